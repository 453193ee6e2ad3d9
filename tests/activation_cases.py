"""Problems shared by the CPU and the GPU tests of the gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.epilogue import Epilogue
from tests.epilogue_cases import applied, make_epilogue

TOLERANCE = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Largest relative error (Frobenius norm) against float32: half a unit in the last place, as a row may be one large
value; for float32 itself, approximate roots."""


def make_gate_up(tokens: int, inner: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows that are parts of longer ones, with some large values."""
    generator = torch.Generator(device).manual_seed(0)
    return (torch.randn(tokens, 2 * inner + 16, generator=generator, device=device) * 4).to(dtype)[:, : 2 * inner]


def check(
    gate: Callable[[Tensor, Epilogue], Tensor],
    tokens: int,
    inner: int,
    dtype: torch.dtype,
    *,
    row_size: int = 0,
    bias: bool = False,
    device: str = "cpu",
) -> None:
    """Assert that the product of the gate comes out right, after an epilogue as `make_epilogue` makes it."""
    gate_up = make_gate_up(tokens, inner, dtype, device)
    epilogue = make_epilogue(tokens, 2 * inner, row_size, bias, dtype, device)
    gates, ups = applied(epilogue, gate_up).chunk(2, dim=1)
    expected = silu(gates) * ups
    computed = gate(gate_up, epilogue)
    assert computed.dtype == dtype
    assert computed.is_contiguous()
    # Row by row: rows of an epilogue make some large and some small.
    errors = (computed.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < TOLERANCE[dtype]
