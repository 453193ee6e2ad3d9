"""The compiled gate."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_and_mul
from kernels.epilogue_triton import MANY_TOKENS
from tests.activation_cases import TOLERANCE, check


@pytest.mark.parametrize("tokens", [300, MANY_TOKENS])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inner", [100, 768, 3072, 14336])
def test_product_matches_the_reference(inner: int, dtype: torch.dtype, tokens: int) -> None:
    check(silu_and_mul, tokens, inner, dtype, device="cuda")


@pytest.mark.parametrize("tokens", [300, MANY_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "row_size"), [(100, 100), (3072, 1024), (14336, 4096), (768, 5000), (768, 16384)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_epilogue_of_the_product_comes_first(
    inner: int, row_size: int, bias: bool, dtype: torch.dtype, tokens: int
) -> None:
    check(silu_and_mul, tokens, inner, dtype, row_size=row_size, bias=bias, device="cuda")


def test_rows_beyond_2_to_the_31_elements_are_computed() -> None:
    tokens = 2**31 // 32768 + 2
    gate_up = torch.zeros(tokens, 32768, dtype=torch.bfloat16, device="cuda")
    gate_up[-1] = 64.0
    product = silu_and_mul(gate_up)
    assert bool((product[-1] == 4096.0).all())
    assert product[:-1].count_nonzero() == 0
