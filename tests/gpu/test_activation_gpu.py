"""The compiled gate."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from kernels.activation import silu_and_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inner", [100, 768, 3072, 14336])
def test_product_matches_the_reference(inner: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(300, 2 * inner + 16, device="cuda").to(dtype)[:, : 2 * inner]
    expected = silu(gate_up[:, :inner].float()) * gate_up[:, inner:].float()
    assert float((silu_and_mul(gate_up).float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_rows_beyond_2_to_the_31_elements_are_computed() -> None:
    tokens = 2**31 // 32768 + 2
    gate_up = torch.zeros(tokens, 32768, dtype=torch.bfloat16, device="cuda")
    gate_up[-1] = 64.0
    product = silu_and_mul(gate_up)
    assert bool((product[-1] == 4096.0).all())
    assert product[:-1].count_nonzero() == 0
