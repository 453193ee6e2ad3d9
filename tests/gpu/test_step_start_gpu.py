"""The compiled start of a step."""

from __future__ import annotations

import pytest
import torch

from kernels.step_start import start_step
from tests.step_start_cases import expected_start, make_start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 1000, 1024, 4096, 16384])
@pytest.mark.parametrize(("tokens", "changes"), [(1, 1), (16, 16), (3, 700), (2000, 500)])
def test_tokens_are_looked_up_and_changes_made(tokens: int, changes: int, size: int, dtype: torch.dtype) -> None:
    step = make_start(tokens, changes, size, dtype=dtype, device="cuda")
    hidden, tables = expected_start(**step)
    assert torch.equal(start_step(**step), hidden)
    assert torch.equal(step["block_tables"], tables)
