"""A column of ready token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from runner.config import ConfigError
from runner.prompt_reader import column_type
from runner.row_problem import RowProblem

TokenIds = npt.NDArray[np.int32]


class TokenIdsReader:
    """Reads prompts from a column of lists of integers, as arrays over the whole batch.

    Raises:
        ConfigError: the column does not exist or holds something else.
    """

    def __init__(self, column: str, schema: pa.Schema, vocab_size: int) -> None:
        kind = column_type("prompt.token_ids_column", column, schema)
        values = getattr(kind, "value_type", None)
        is_ids = values is not None and (pa.types.is_integer(values) or pa.types.is_null(values))
        if not pa.types.is_null(kind) and (not is_ids or pa.types.is_dictionary(kind)):
            raise ConfigError("prompt.token_ids_column", column, f"a column of lists of integers (this one is {kind})")
        self.columns = (column,)
        self._vocab_size = vocab_size

    def read(self, batch: pa.RecordBatch) -> list[TokenIds | RowProblem]:
        """One int32 [tokens] array a row, or why there is none."""
        column = batch.column(self.columns[0])
        if pa.types.is_null(column.type):
            return [self._problem("is null")] * len(column)
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(lengths)
        # Ids are read as int64, null ones as -1: whatever cannot be a token id is out of range.
        ids = column.flatten()
        values = pc.fill_null(ids.cast(pa.int64(), safe=False), -1).to_numpy(zero_copy_only=False)
        outside = (values < 0) | (values >= self._vocab_size)
        seen = np.concatenate(([0], np.cumsum(outside)))
        faults = seen[ends] - seen[ends - lengths]
        tokens = values.astype(np.int32)
        rows: list[TokenIds | RowProblem] = []
        for end, length, fault, null in zip(
            ends.tolist(), lengths.tolist(), faults.tolist(), is_null.tolist(), strict=True
        ):
            if null or length == 0:
                rows.append(self._problem("is null" if null else "is an empty list"))
            elif fault:
                rows.append(self._outside(ids[end - length : end], outside[end - length : end]))
            else:
                rows.append(tokens[end - length : end])
        return rows

    def _problem(self, what: str) -> RowProblem:
        return RowProblem(f"column {self.columns[0]!r} {what}; fill or drop the row")

    def _outside(self, ids: pa.Array, outside: Any) -> RowProblem:
        place = int(outside.argmax())
        value = ids[place].as_py()
        shown = "null" if value is None else value
        return RowProblem(
            f"column {self.columns[0]!r} holds {shown} at place {place}; token ids are 0 to {self._vocab_size - 1}"
        )
