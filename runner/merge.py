"""Committed parts read as one table in row order, in bounded memory: an external merge.

Every part is sorted by (row_id, sample). A sorted read takes, range of rows by range of rows, the
next rows of each part; see Knuth, The Art of Computer Programming, volume 3, section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from runner.part_file import ROW_GROUP_ROWS, read_batches

MERGE_WIDTH = 256
"""Parts read side by side: bounds open files, and memory to a few pages of each."""

_MIN_BATCH_ROWS = 32


class SortedRead:
    """Several sorted parts read side by side, from the smallest row id upwards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        batch_rows = max(_MIN_BATCH_ROWS, ROW_GROUP_ROWS // max(1, len(paths)))
        self._cursors = [_Cursor(read_batches(path, batch_rows)) for path in paths]

    def through(self, last_row_id: int) -> pa.Table:
        """The rows up to and with `last_row_id` that were not taken before, sorted by (row_id, sample)."""
        taken = [batch for cursor in self._cursors for batch in cursor.through(last_row_id)]
        return sort_rows(pa.Table.from_batches(taken))


class _Cursor:
    """A place in one sorted part."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = next(batches, None)

    def through(self, last_row_id: int) -> Iterator[pa.RecordBatch]:
        """The following rows of the part up to and with `last_row_id`."""
        while self._rest is not None:
            row_ids = self._rest.column("row_id").to_numpy()
            count = int(np.searchsorted(row_ids, last_row_id, side="right"))
            if count:
                yield self._rest.slice(0, count)
            if count < len(row_ids):
                self._rest = self._rest.slice(count)
                return
            self._rest = next(self._batches, None)


def sort_rows(table: pa.Table) -> pa.Table:
    """`table` sorted by (row_id, sample), in one chunk per column."""
    order = np.lexsort((table.column("sample").to_numpy(), table.column("row_id").to_numpy()))
    return table.combine_chunks().take(pa.array(order))
