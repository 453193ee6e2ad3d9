"""Sorted parts read side by side."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from runner.merge import SortedRead, sort_rows
from runner.part_file import write_part
from runner.storage import install

SCHEMA = pa.schema([("row_id", pa.int64()), ("sample", pa.int32()), ("text", pa.string())])
Pair = tuple[int, int]


def table_of(pairs: list[Pair]) -> pa.Table:
    rows, samples = [row for row, _ in pairs], [sample for _, sample in pairs]
    return pa.table([rows, samples, [f"{row}/{sample}" for row, sample in pairs]], schema=SCHEMA)


def write(folder: Path, number: int, pairs: list[Pair]) -> Path:
    path = folder / f"{number}.parquet"
    write_part(path, [table_of(sorted(pairs))], SCHEMA, "zstd")
    install(path)
    return path


def pairs_of(table: pa.Table) -> list[Pair]:
    pairs = list(zip(table["row_id"].to_pylist(), table["sample"].to_pylist(), strict=True))
    assert table["text"].to_pylist() == [f"{row}/{sample}" for row, sample in pairs]
    return pairs


@pytest.mark.parametrize("seed", range(5))
def test_ranges_of_rows_come_whole_and_sorted_from_however_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("runner.merge.ROW_GROUP_ROWS", 9)
    monkeypatch.setattr("runner.merge._MIN_BATCH_ROWS", 2)  # so that ranges begin and end inside of batches
    rng = random.Random(seed)
    pairs = [(row, sample) for row in range(0, 150, 3) for sample in range(3)]
    parts: list[list[Pair]] = [[] for _ in range(7)]
    for pair in pairs:
        rng.choice(parts[:-1]).append(pair)  # the last part has no rows
    read = SortedRead([write(tmp_path, number, part) for number, part in enumerate(parts)])
    last_ids = [*sorted(rng.sample(range(0, 147, 3), 6)), 147]
    first = -1
    for last in last_ids:
        assert pairs_of(read.through(last)) == [pair for pair in pairs if first < pair[0] <= last]
        first = last


def test_a_range_may_end_between_the_rows_that_are_there(tmp_path: Path) -> None:
    read = SortedRead([write(tmp_path, 0, [(2, 0), (8, 0)]), write(tmp_path, 1, [(5, 0), (9, 0)])])
    assert pairs_of(read.through(7)) == [(2, 0), (5, 0)]
    assert pairs_of(read.through(100)) == [(8, 0), (9, 0)]


def test_rows_are_sorted_by_row_and_then_by_sample_into_one_chunk() -> None:
    pairs = [(2**53 + 1, 0), (3, 1), (2**53, 5), (3, 0), (-1, 2)]
    found = sort_rows(pa.concat_tables([table_of(pairs[:2]), table_of(pairs[2:])]))
    assert pairs_of(found) == sorted(pairs)
    assert {column.num_chunks for column in found.columns} == {1}
