"""The compiled norm."""

from __future__ import annotations

import pytest
import torch

from kernels.norm import MAX_SIZE, rms_norm
from tests.norm_cases import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 1000, 1024, 2560, 4096, MAX_SIZE])
def test_rows_match_the_reference(size: int, dtype: torch.dtype) -> None:
    check(rms_norm, 300, size, dtype, "cuda")


def test_rows_beyond_2_to_the_31_elements_are_computed() -> None:
    rows = 2**31 // MAX_SIZE + 2
    x = torch.zeros(rows, MAX_SIZE, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    rms_norm(x, torch.ones(MAX_SIZE, dtype=torch.bfloat16, device="cuda"), 1e-5, out=x)
    assert bool((x[-1] == 1.0).all())
    assert x[:-1].count_nonzero() == 0
