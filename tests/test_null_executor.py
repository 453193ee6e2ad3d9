from __future__ import annotations

import numpy as np
import pytest

from benchmarks.null_executor import TOKEN, NullExecutor
from engine.engine import Engine
from engine.request import Request, Sampling
from engine.scheduler import Limits


@pytest.mark.parametrize("async_steps", [False, True])
def test_every_request_draws_one_token_over_and_over_to_its_length(async_steps: bool) -> None:
    engine = Engine(NullExecutor(), Limits(3, 16, 64), num_blocks=16, block_size=4, async_steps=async_steps)
    lengths = {row: 1 + row for row in range(8)}
    for row, length in lengths.items():
        engine.add(Request(row, np.arange(1, 10, dtype=np.int32), Sampling(max_tokens=length)))
    ended = []
    while engine.has_work:
        ended += engine.step().completions
    assert {each.row_id: each.token_ids.tolist() for each in ended} == {
        row: [TOKEN] * length for row, length in lengths.items()
    }
    assert {each.finish_reason for each in ended} == {"length"}
