"""From the committed parts of a shard to the files that users read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from runner.config import SinkConfig
from runner.ledger import Ledger
from runner.merge import MERGE_WIDTH, SortedRead
from runner.output_schema import STATS_SCHEMA
from runner.part_file import ROW_GROUP_ROWS, read_batches, read_columns, write_part
from runner.records import START_OVER, FileRecord, LedgerError
from runner.storage import make_folder, temporary
from runner.summary import PUBLISH, Summary


def publish(ledger: Ledger, config: SinkConfig, *, expected_rows: int, summary: Summary) -> Summary:
    """Write `completions/`, `stats/` and the summary, and make the shard complete.

    Files hold `sink.rows_per_part` rows each, in input order or, with `sink.order=completion`, as
    committed; without rows there is one empty file. The parts are deleted after. The disk must hold
    both for a moment, memory about `ROW_GROUP_ROWS` rows and a page of each column of each part. Killed
    at any point, the shard is either still unpublished or finished by the next opening of the ledger.
    A complete shard is left as it is.

    Args:
        ledger: the shard, with every row committed.
        config: `rows_per_part`, `order` and `compression`.
        expected_rows: output rows that the job must have: its rows times the samples of each.
        summary: what the shard did up to now.

    Returns:
        The summary as it was written, with the seconds that publishing took.

    Raises:
        LedgerError: rows are missing or there twice, or a part is damaged.
        StorageError: the folder could not be read or written.
    """
    if ledger.is_complete:
        return summary
    began = time.perf_counter()
    layout, parts = ledger.layout, ledger.completion_parts
    row_ids = _checked_row_ids(parts, expected_rows)
    tables = _in_input_order(ledger, parts, row_ids) if config.order == "input" else _in_commit_order(parts)
    completions = _write_files(ledger, layout.completions, tables, ledger.schema, config)
    stats = _write_files(ledger, layout.stats, _in_commit_order(ledger.stats_parts), STATS_SCHEMA, config)
    seconds = {**summary.seconds, PUBLISH: round(time.perf_counter() - began, 3)}
    summary = dataclasses.replace(summary, seconds=seconds)
    ledger.publish(completions, stats, dataclasses.asdict(summary))
    return summary


def _checked_row_ids(parts: Sequence[Path], expected_rows: int) -> npt.NDArray[np.int64]:
    """The row id of every output row, ascending, once all of them are known to be there once."""
    row_ids = _column(parts, "row_id", np.int64)
    samples = _column(parts, "sample", np.int32)
    order = np.lexsort((samples, row_ids))
    row_ids, samples = row_ids[order], samples[order]
    twice = np.flatnonzero((row_ids[1:] == row_ids[:-1]) & (samples[1:] == samples[:-1]))
    if len(twice):
        raise LedgerError(f"row {row_ids[twice[0]]}, sample {samples[twice[0]]} is committed twice. {START_OVER}")
    if len(row_ids) != expected_rows:
        raise LedgerError(f"{len(row_ids)} output rows are committed, {expected_rows} were expected. {START_OVER}")
    return row_ids


def _column(parts: Sequence[Path], name: str, dtype: type[np.generic]) -> npt.NDArray:
    pieces = [read_columns(path, [name]).column(0).to_numpy() for path in parts]
    return np.concatenate([np.empty(0, dtype), *pieces])


def _in_commit_order(parts: Sequence[Path]) -> Iterator[pa.Table]:
    for path in parts:
        for batch in read_batches(path, ROW_GROUP_ROWS):
            yield pa.Table.from_batches([batch])


def _in_input_order(ledger: Ledger, parts: Sequence[Path], row_ids: npt.NDArray[np.int64]) -> Iterator[pa.Table]:
    """All rows of the parts sorted, some `ROW_GROUP_ROWS` at a time; too many parts are first merged to fewer."""
    paths = [*parts]
    runs = 0
    while len(paths) > MERGE_WIDTH:
        count = min(MERGE_WIDTH, len(paths) - MERGE_WIDTH + 1)
        group, paths = paths[:count], paths[count:]
        run = ledger.layout.merge_run(runs)
        group_ids = np.sort(_column(group, "row_id", np.int64))
        # Only ever a temporary: it is read under its hidden name and deleted with the parts.
        write_part(run, _sorted_tables(group, group_ids), ledger.schema, "zstd")
        paths.append(temporary(run))
        runs += 1
    yield from _sorted_tables(paths, row_ids)


def _sorted_tables(paths: Sequence[Path], row_ids: npt.NDArray[np.int64]) -> Iterator[pa.Table]:
    """The rows of sorted files as one sorted sequence; `row_ids` are all their row ids, ascending."""
    read = SortedRead(paths)
    # The last row id of each table: all samples of a row go into one.
    for last in np.unique(np.append(row_ids[ROW_GROUP_ROWS - 1 :: ROW_GROUP_ROWS], row_ids[-1:])):
        yield read.through(int(last))


def _write_files(
    ledger: Ledger, folder: Path, tables: Iterator[pa.Table], schema: pa.Schema, config: SinkConfig
) -> list[FileRecord]:
    """Write the temporaries of as many files as the rows need, at least one."""
    make_folder(folder)
    feed = _Feed(tables)
    files: list[FileRecord] = []
    while not files or feed.has_rows:
        path = ledger.layout.published(folder, len(files))
        files.append(write_part(path, feed.take(config.rows_per_part), schema, config.compression))
    return files


class _Feed:
    """A sequence of tables, taken by number of rows."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest = next(tables, None)

    @property
    def has_rows(self) -> bool:
        return self._rest is not None

    def take(self, rows: int) -> Iterator[pa.Table]:
        """The next `rows` rows, or all there are."""
        while rows and self._rest is not None:
            piece = self._rest.slice(0, rows)
            yield piece
            rows -= piece.num_rows
            rest = self._rest.slice(piece.num_rows)
            self._rest = rest if rest.num_rows else next(self._tables, None)
