"""Finished rows and step statistics on their way into committed parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from engine.request import FinishReason, TokenIds
from engine.stats import StepStats
from runner.config import SinkConfig
from runner.ledger import Ledger
from runner.merge import sort_rows
from runner.output_schema import ID_COLUMN, STATS_SCHEMA
from runner.part_file import write_part
from runner.records import CommitRecord, FileRecord, RowTotals
from runner.storage import StorageError, install, sync_folder

# Text of one part stays far below 2 GiB, where a column of strings with 32-bit offsets ends.
_MAX_BUFFERED_BYTES = 1 << 30
_MAX_STEPS = 100_000  # some hours of steps, about 40 MB


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One sample of a row; `token_ids` and `prompt` are None where they are no columns."""

    row_id: int
    sample: int
    completion: str | None
    finish_reason: FinishReason
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    token_ids: TokenIds | None = None
    prompt: str | None = None


class Sink:
    """Buffers rows and steps, and commits them as one part when `sink.commit_every` says so.

    All samples of a row go into one part, so that a row is committed as a whole or not at all. A part
    holds no more than `sink.rows_per_part` rows, but those of one row of the input at least. What is not
    committed when the process ends is lost and runs again. As a context manager it commits the rest, also when
    something else failed (finished rows stay finished), but not after storage did, or when told to leave at once.

    Args:
        ledger: the shard, open and not complete.
        config: when to commit, and the compression.
        samples: output rows of each row of the input.
        clock: seconds, monotonic.
    """

    def __init__(
        self, ledger: Ledger, config: SinkConfig, *, samples: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        interval = config.commit_interval
        self._ledger = ledger
        self._compression = config.compression
        whole_rows = max(1, config.rows_per_part // samples)
        self._max_rows = samples * min(whole_rows, interval.rows or whole_rows)
        self._max_seconds = interval.seconds
        self._clock = clock
        self._last_commit = clock()
        self._clear()

    def _clear(self) -> None:
        self._rows: list[OutputRow] = []
        self._carried: list[pa.RecordBatch] = []
        self._steps: list[StepStats] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (issubclass(kind, Exception) and not issubclass(kind, StorageError)):
            self.commit()

    def write(self, rows: Sequence[OutputRow], carried: pa.RecordBatch | None) -> None:
        """Take finished rows, committing when a part is due.

        Args:
            rows: in any order, but all samples of a row of the input next to each other.
            carried: row for row, the source's values of `id`, if it is a column, then of the kept
                columns, in the order of the schema; names do not matter. None if there are none. Taken
                rows, not slices: a slice would keep its whole source batch in memory.

        Raises:
            StorageError: a due commit failed; the rows since the last commit are lost.
        """
        start = 0
        while start < len(rows):
            end = min(len(rows), start + self._max_rows - len(self._rows))
            self._buffer(rows[start:end], carried.slice(start, end - start) if carried is not None else None)
            start = end
            if self._is_due():
                self.commit()

    def record_step(self, stats: StepStats) -> None:
        """Take the statistics of a launched step; raises like `write`."""
        self._steps.append(stats)
        if self._is_due():
            self.commit()

    def commit(self) -> None:
        """Make everything buffered durable, as one part; nothing buffered does nothing.

        Raises:
            StorageError: the part could not be written; it does not count and is removed at the next start.
        """
        rows, carried, steps = self._rows, self._carried, self._steps
        self._clear()
        self._last_commit = self._clock()
        if not rows and not steps:
            return
        layout, number = self._ledger.layout, self._ledger.next_part
        row_ids = [row.row_id for row in rows]
        record = CommitRecord(
            attempt=self._ledger.attempt,
            fingerprint=self._ledger.fingerprint_digest,
            first_row_id=min(row_ids, default=None),
            last_row_id=max(row_ids, default=None),
            totals=_totals(rows),
            completions=self._write(layout.part(number), _row_table(rows, carried, self._ledger.schema)),
            stats=self._write(layout.stats_part(number), _step_table(steps, self._ledger.attempt)),
        )
        sync_folder(layout.parts)
        self._ledger.commit(number, record)

    def _buffer(self, rows: Sequence[OutputRow], carried: pa.RecordBatch | None) -> None:
        self._rows += rows
        self._bytes += sum(_text_bytes(row) for row in rows)
        if carried is not None:
            self._carried.append(carried)
            self._bytes += carried.nbytes

    def _is_due(self) -> bool:
        """Whether to commit now. Steps alone wait for a row, unless they pile up."""
        if len(self._rows) >= self._max_rows or len(self._steps) >= _MAX_STEPS or self._bytes > _MAX_BUFFERED_BYTES:
            return True
        overdue = self._max_seconds is not None and self._clock() - self._last_commit >= self._max_seconds
        return overdue and bool(self._rows)

    def _write(self, path: Path, table: pa.Table) -> FileRecord | None:
        """Write a file of a part under its name; no rows, no file."""
        if not table.num_rows:
            return None
        record = write_part(path, [table], table.schema, self._compression)
        install(path)
        return record


def _totals(rows: Sequence[OutputRow]) -> RowTotals:
    ran = [row for row in rows if row.error is None]
    prompts = {row.row_id: row for row in ran}.values()  # one sample of each row
    return RowTotals(
        rows=len({row.row_id for row in rows}),
        completions=len(rows),
        errors=len(rows) - len(ran),
        prompt_tokens=sum(row.prompt_tokens for row in prompts),
        cached_tokens=sum(row.cached_tokens for row in prompts),
        output_tokens=sum(row.output_tokens for row in ran),
    )


def _text_bytes(row: OutputRow) -> int:
    """About the bytes of a row's texts."""
    return sum(len(text) for text in (row.completion, row.error, row.prompt) if text is not None)


def _row_table(rows: Sequence[OutputRow], carried: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """The rows as a table of `schema`, sorted by (row_id, sample)."""
    if not rows:
        return schema.empty_table()
    from_source = iter(_carried_columns(carried))
    source_names = _source_names(schema, carried[0].num_columns if carried else 0)
    columns: list[Any] = []
    for field in schema:
        if field.name in source_names:
            columns.append(next(from_source).cast(field.type))
        else:
            columns.append(_own_column(rows, field))
    return sort_rows(pa.Table.from_arrays(columns, schema=schema))


def _source_names(schema: pa.Schema, count: int) -> set[str]:
    """The columns that `count` source columns become: `id`, which comes second, and the last ones."""
    has_id = schema.names[1] == ID_COLUMN
    kept = schema.names[len(schema) - (count - has_id) :]
    return {ID_COLUMN, *kept} if has_id else {*kept}


def _carried_columns(carried: Sequence[pa.RecordBatch]) -> list[pa.ChunkedArray]:
    return pa.Table.from_batches(carried).columns if carried else []


def _own_column(rows: Sequence[OutputRow], field: pa.Field) -> pa.Array:
    values = [getattr(row, field.name) for row in rows]
    if not pa.types.is_list(field.type):
        return pa.array(values, field.type)
    # Token ids: one flat copy instead of a Python object per token.
    lengths = [0 if ids is None else len(ids) for ids in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, np.int32), *(ids for ids in values if ids is not None)]).astype(np.int32)
    missing = pa.array([ids is None for ids in values])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=field.type, mask=missing)


def _step_table(steps: Sequence[StepStats], attempt: int) -> pa.Table:
    """The steps as a table of `STATS_SCHEMA`."""
    columns = [
        pa.array([attempt] * len(steps) if name == "attempt" else [getattr(step, name) for step in steps], kind)
        for name, kind in zip(STATS_SCHEMA.names, STATS_SCHEMA.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=STATS_SCHEMA)
