"""What sources share: the size of batches, cutting them, and missing columns."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest

from runner.source_batch import (
    MAX_BATCH_ROWS,
    TARGET_BATCH_BYTES,
    SourceError,
    check_columns,
    clip,
    parts_between,
    rows_per_batch,
)


@pytest.mark.parametrize(
    ("mean_row_bytes", "rows"),
    [
        (0.0, MAX_BATCH_ROWS),
        (0.25, MAX_BATCH_ROWS),
        (TARGET_BATCH_BYTES / MAX_BATCH_ROWS, MAX_BATCH_ROWS),
        (TARGET_BATCH_BYTES / 10, 10),
        (TARGET_BATCH_BYTES / 10.5, 10),
        (TARGET_BATCH_BYTES, 1),
        (TARGET_BATCH_BYTES * 50.0, 1),
    ],
)
def test_a_batch_holds_rows_up_to_its_bytes_but_one_at_least(mean_row_bytes: float, rows: int) -> None:
    assert rows_per_batch(mean_row_bytes) == rows


def test_a_cut_batch_keeps_every_row_under_its_own_id() -> None:
    batch = pa.RecordBatch.from_pydict({"row": list(range(10, 15))})
    for start in range(8, 18):
        for stop in range(start, 18):
            expected = [row for row in range(10, 15) if start <= row < stop]
            cut = clip(batch, 10, start, stop)
            if cut is None:
                assert expected == []
            else:
                assert cut.table.column("row").to_pylist() == expected
                assert cut.first_row_id == expected[0]


def test_a_missing_column_is_named_beside_those_that_exist() -> None:
    schema = pa.schema([("text", pa.string()), ("id", pa.int64())])
    check_columns(["id", "text", "id"], schema, "a.parquet")
    with pytest.raises(SourceError, match=r"^a\.parquet has no column 'key'; its columns are: text, id$"):
        check_columns(["id", "key"], schema, "a.parquet")
    with pytest.raises(SourceError, match=r"its columns are: none$"):
        check_columns(["key"], pa.schema([]), "a.jsonl")


@dataclass(frozen=True)
class Counted:
    """A part of so many rows."""

    rows: int


@pytest.mark.parametrize(
    ("skip", "limit", "expected"),
    [
        (0, None, [(3, 0), (0, 3), (4, 3), (2, 7)]),
        (3, None, [(4, 3), (2, 7)]),
        (2, 1, [(3, 0)]),
        (2, 2, [(3, 0), (0, 3), (4, 3)]),
        (9, None, []),
        (0, 0, []),
    ],
)
def test_only_parts_that_hold_wanted_rows_are_read(
    skip: int, limit: int | None, expected: list[tuple[int, int]]
) -> None:
    parts = [Counted(3), Counted(0), Counted(4), Counted(2)]
    assert [(part.rows, first) for part, first, _ in parts_between(parts, skip, limit)] == expected
