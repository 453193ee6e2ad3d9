"""Both forms of the norm against float32. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.norm import MAX_SIZE, rms_norm, rms_norm_torch
from tests.interpreted import interpreted
from tests.norm_cases import EPS, check, make_inputs

Norm = Callable[..., Tensor]


@pytest.fixture
def triton_form() -> Norm:
    return interpreted("kernels.norm_triton").rms_norm_triton


@pytest.fixture(params=["torch", "triton"])
def norm(request: pytest.FixtureRequest) -> Norm:
    return rms_norm if request.param == "torch" else request.getfixturevalue("triton_form")


# The interpreter cuts bfloat16 off instead of rounding it: tests/gpu covers it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [8, 96, 1000, 1024, 4096, MAX_SIZE])
def test_rows_match_the_reference(norm: Norm, size: int, dtype: torch.dtype) -> None:
    check(norm, 3, size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_form_equals_transformers(dtype: torch.dtype) -> None:
    x, weight = make_inputs(5, 96, dtype)
    theirs = LlamaRMSNorm(96, EPS).to(dtype)
    theirs.weight.data = weight
    expected = theirs(x)
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert torch.equal(rms_norm_torch(x[None], weight, EPS), expected[None])


def test_the_result_goes_into_out_which_may_be_the_input(norm: Norm) -> None:
    x, weight = make_inputs(3, 96, torch.float32)
    expected = norm(x.clone(), weight, EPS)
    storage = torch.full((3, 100), 7.0)
    out = storage[:, :96]
    assert norm(x, weight, EPS, out) is out
    assert torch.equal(out, expected)
    assert bool((storage[:, 96:] == 7.0).all())
    assert norm(x, weight, EPS, x) is x
    assert torch.equal(x, expected)


def test_no_rows_have_no_norm(norm: Norm) -> None:
    x, weight = make_inputs(0, 96, torch.float32)
    assert norm(x, weight, EPS).shape == (0, 96)


def test_a_row_of_zeros_stays_zero(norm: Norm) -> None:
    assert not norm(torch.zeros(1, 64), torch.ones(64), EPS).any()


def test_triton_form_refuses_rows_it_cannot_read(triton_form: Norm) -> None:
    x, weight = make_inputs(3, 96, torch.float32)
    with pytest.raises(ValueError, match=r"x has strides \(1, 3\): its last dimension must be contiguous"):
        triton_form(x.T.contiguous().T, weight, EPS)
    with pytest.raises(ValueError, match=f"rows of {MAX_SIZE + 1} elements: at most {MAX_SIZE}"):
        triton_form(*make_inputs(1, MAX_SIZE + 1, torch.float32), EPS)
