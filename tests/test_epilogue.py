from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.epilogue import NO_EPILOGUE, Epilogue
from tests.epilogue_cases import EPS, make_epilogue
from tests.interpreted import interpreted


@pytest.fixture
def epilogue_triton() -> Any:
    return interpreted("kernels.epilogue_triton")


def test_a_product_after_its_epilogue_is_that_of_normed_rows() -> None:
    epilogue = make_epilogue(5, 24, 96, True, torch.float32)
    assert epilogue.rows is not None
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    expected = F.linear(LlamaRMSNorm(96, EPS)(epilogue.rows), weight, epilogue.bias)
    torch.testing.assert_close(epilogue.apply_torch(F.linear(epilogue.rows, weight)), expected)


def test_without_rows_and_bias_nothing_but_the_dtype_changes() -> None:
    product = torch.randn(5, 24).bfloat16()
    assert torch.equal(NO_EPILOGUE.apply_torch(product), product.float())


def test_triton_form_refuses_what_it_cannot_read(epilogue_triton: Any) -> None:
    with pytest.raises(ValueError, match=r"rows has strides \(1, 3\): its last dimension must be contiguous"):
        epilogue_triton.epilogue_arguments(Epilogue(rows=torch.zeros(4, 3).T))
    with pytest.raises(ValueError, match=r"bias has strides \(2,\): its last dimension must be contiguous"):
        epilogue_triton.epilogue_arguments(Epilogue(bias=torch.zeros(8)[::2]))
