"""Both forms of the gate against float32. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.activation import silu_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
Gate = Callable[[Tensor], Tensor]


@pytest.fixture
def triton_form() -> Gate:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here: tests/gpu covers it")
    return pytest.importorskip("kernels.activation_triton").silu_and_mul_triton


@pytest.fixture(params=["torch", "triton"])
def gate(request: pytest.FixtureRequest) -> Gate:
    return silu_and_mul if request.param == "torch" else request.getfixturevalue("triton_form")


def make_gate_up(tokens: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Rows that are parts of longer ones, with some large values."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(tokens, 2 * inner + 16, generator=generator) * 4).to(dtype)[:, : 2 * inner]


# The interpreter cuts bfloat16 off instead of rounding it: tests/gpu covers it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", [8, 100, 1024, 2500])
def test_product_matches_the_reference(gate: Gate, inner: int, dtype: torch.dtype) -> None:
    gate_up = make_gate_up(5, inner, dtype)
    expected = silu(gate_up[:, :inner].float()) * gate_up[:, inner:].float()
    computed = gate(gate_up)
    assert computed.dtype == dtype
    assert computed.is_contiguous()
    assert float((computed.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_neither_overflow_nor_vanish(gate: Gate) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert gate(gate_up).tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]


def test_no_tokens_have_no_product(gate: Gate) -> None:
    assert gate(make_gate_up(0, 96, torch.float32)).shape == (0, 96)


def test_triton_form_refuses_rows_it_cannot_read(triton_form: Gate) -> None:
    with pytest.raises(ValueError, match=r"gate_up has strides \(1, 3\): its last dimension must be contiguous"):
        triton_form(make_gate_up(3, 4, torch.float32).T.contiguous().T)
