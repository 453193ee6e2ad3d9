"""Both forms of the gate against float32. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_and_mul
from tests.activation_cases import check, make_gate_up
from tests.interpreted import interpreted

Gate = Callable[..., Tensor]


@pytest.fixture
def triton_form() -> Gate:
    return interpreted("kernels.activation_triton").silu_and_mul_triton


@pytest.fixture(params=["torch", "triton"])
def gate(request: pytest.FixtureRequest) -> Gate:
    return silu_and_mul if request.param == "torch" else request.getfixturevalue("triton_form")


# The interpreter cuts bfloat16 off instead of rounding it: tests/gpu covers it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", [8, 100, 1024, 2500])
def test_product_matches_the_reference(gate: Gate, inner: int, dtype: torch.dtype) -> None:
    check(gate, 5, inner, dtype)


# 5000 elements are more than a program holds at a time.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("row_size", "bias"), [(96, False), (100, True), (5000, True), (0, True)])
def test_the_epilogue_of_the_product_comes_first(gate: Gate, row_size: int, bias: bool, dtype: torch.dtype) -> None:
    check(gate, 5, 100, dtype, row_size=row_size, bias=bias)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("inner", [100, 5000])
def test_the_wide_programs_of_many_tokens_compute_the_same(
    triton_form: Gate, monkeypatch: pytest.MonkeyPatch, inner: int
) -> None:
    monkeypatch.setattr("kernels.activation_triton.MANY_TOKENS", 1)
    check(triton_form, 5, inner, torch.float32, row_size=96, bias=True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_neither_overflow_nor_vanish(gate: Gate) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert gate(gate_up).tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]


def test_no_tokens_have_no_product(gate: Gate) -> None:
    assert gate(make_gate_up(0, 96, torch.float32)).shape == (0, 96)


def test_triton_form_refuses_rows_it_cannot_read(triton_form: Gate) -> None:
    with pytest.raises(ValueError, match=r"gate_up has strides \(1, 3\): its last dimension must be contiguous"):
        triton_form(make_gate_up(3, 4, torch.float32).T.contiguous().T)
