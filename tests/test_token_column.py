"""Prompts that are ready token ids."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from runner.config import ConfigError
from runner.prompt import Prompt, RowError
from tests.prompt_rows import (
    VOCAB,
    batch_of,
    build,
    builder,
    prompts,
)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_view(pa.int32())]
)
def test_ready_token_ids_pass_through(kind: pa.DataType) -> None:
    column = pa.array([[9], [1, 2, 3], [VOCAB - 1], [0, 0]], kind)
    for sliced in (0, 1):
        columns = batch_of(ids=column).slice(sliced)
        found = prompts(None, columns, token_ids_column="ids")
        assert [prompt.token_ids.tolist() for prompt in found] == column.to_pylist()[sliced:]
        assert {prompt.token_ids.dtype for prompt in found} == {np.dtype(np.int32)}


def test_token_ids_of_fixed_size_are_read() -> None:
    column = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    results = build(None, batch_of(ids=column), token_ids_column="ids")
    assert [result.token_ids.tolist() if isinstance(result, Prompt) else None for result in results] == [
        [1, 2],
        None,
        [3, 4],
    ]


def test_token_ids_that_cannot_run_are_error_rows() -> None:  # trap 42, trap 26
    column = pa.array([None, [], [1, None], [-1], [5, VOCAB], [2**40], [1]], pa.list_(pa.int64()))
    results = build(None, batch_of(ids=column), token_ids_column="ids")
    found = [result.error.split(": ", 1)[1] for result in results if isinstance(result, RowError)]
    assert found == [
        "column 'ids' is null; fill or drop the row",
        "column 'ids' is an empty list; fill or drop the row",
        "column 'ids' holds null at place 1; token ids are 0 to 499",
        "column 'ids' holds -1 at place 0; token ids are 0 to 499",
        "column 'ids' holds 500 at place 1; token ids are 0 to 499",
        f"column 'ids' holds {2**40} at place 0; token ids are 0 to 499",
    ]
    assert isinstance(results[-1], Prompt)


def test_a_chat_of_token_ids_is_refused() -> None:
    columns = batch_of(ids=[[1]])
    for key in ({"chat": "always"}, {"system": "x"}, {"chat_kwargs": {"a": 1}}):
        with pytest.raises(ConfigError, match="token_ids_column"):
            builder(None, columns, token_ids_column="ids", **key)
