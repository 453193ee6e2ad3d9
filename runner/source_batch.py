"""What every kind of source hands on: record batches whose rows have a stable `row_id`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa

_Part = TypeVar("_Part", bound="CountedPart")

MAX_BATCH_ROWS = 4096
# A batch of long rows stops near this many bytes, so that memory does not follow the length of the text.
TARGET_BATCH_BYTES = 32 * 2**20


class SourceError(Exception):
    """An input that cannot be read: exit code 2. The message names file, column, row or line."""


@dataclass(frozen=True)
class SourceBatch:
    """Some rows of the input: row i of `table` is row `first_row_id + i` of the whole source."""

    first_row_id: int
    table: pa.RecordBatch


class Source(Protocol):
    """An input table that is streamed, never held.

    `schema` has all columns of the table; it is empty only where an input without any row does not tell
    its columns. `num_rows` counts all rows, before skip and limit.
    """

    schema: pa.Schema
    num_rows: int | None

    def batches(self, columns: Sequence[str], skip: int, limit: int | None) -> Iterator[SourceBatch]:
        """The rows from number `skip` on, at most `limit` of them, with the given columns.

        Raises:
            SourceError: a column that the source does not have, or data that cannot be read.
        """

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the input, as plain JSON values: equal exactly as long as the input is the same."""


def rows_per_batch(mean_row_bytes: float) -> int:
    """How many rows of a mean size make one batch."""
    return max(1, min(MAX_BATCH_ROWS, int(TARGET_BATCH_BYTES / max(mean_row_bytes, 1.0))))


def clip(table: pa.RecordBatch, first_row_id: int, start: int, stop: int) -> SourceBatch | None:
    """The part of a batch whose row ids lie in [start, stop), None where that is empty."""
    begin = max(start - first_row_id, 0)
    end = min(stop - first_row_id, table.num_rows)
    if begin >= end:
        return None
    return SourceBatch(first_row_id + begin, table.slice(begin, end - begin))


class CountedPart(Protocol):
    """A file of a source, whose rows are counted."""

    @property
    def rows(self) -> int: ...


def parts_between(parts: Sequence[_Part], skip: int, limit: int | None) -> Iterator[tuple[_Part, int, int]]:
    """The parts that hold any of the rows from `skip` on, at most `limit` of them.

    Each comes with the row id of its first row and the row id at which the reading stops.
    """
    rows = sum(part.rows for part in parts)
    stop = rows if limit is None else min(rows, skip + limit)
    first = 0
    for part in parts:
        if first < stop and first + part.rows > skip:
            yield part, first, stop
        first += part.rows


def check_columns(columns: Sequence[str], schema: pa.Schema, where: str) -> None:
    """Refuse columns that the source does not have.

    Raises:
        SourceError: names the missing column and lists those that exist.
    """
    for name in columns:
        if name not in schema.names:
            known = ", ".join(schema.names) or "none"
            raise SourceError(f"{where} has no column {name!r}; its columns are: {known}")
