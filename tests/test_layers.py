from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.models.config import read_model_config
from engine.models.layers import MLP, Linear, NormedLinear, RMSNorm
from tests.tiny_models import tiny_config

CPU = torch.device("cpu")


def randomise(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_that_of_torch(bias: bool) -> None:
    ours = randomise(Linear(6, 4, bias, dtype=torch.float32, device=CPU))
    theirs = nn.Linear(6, 4, bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 6)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_adds_to_the_residual_stream(bias: bool) -> None:
    linear = randomise(Linear(6, 4, bias, dtype=torch.float32, device=CPU))
    assert isinstance(linear, Linear)
    x, hidden = torch.randn(3, 6), torch.randn(3, 4)
    expected = hidden + linear(x)
    linear.add_to(hidden, x)
    torch.testing.assert_close(hidden, expected)


def test_a_norm_is_that_of_transformers() -> None:
    ours = randomise(RMSNorm(64, 1e-5, dtype=torch.float32, device=CPU))
    theirs = LlamaRMSNorm(64, 1e-5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_normed_linear_and_its_epilogue_are_a_norm_and_a_linear(dtype: torch.dtype, bias: bool) -> None:
    ours = randomise(NormedLinear(64, 8, bias, 1e-5, dtype=dtype, device=CPU))
    assert isinstance(ours, NormedLinear)
    x = 20 * torch.randn(3, 64).to(dtype)
    norm = LlamaRMSNorm(64, 1e-5)
    norm.weight.data = ours.norm.weight.float()
    expected = F.linear(norm(x.float()), ours.weight.float(), None if ours.bias is None else ours.bias.float())
    ours.fold_norm()
    product, epilogue = ours(x)
    assert product.dtype == dtype
    error = (epilogue.apply_torch(product) - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


def test_float16_products_do_not_overflow_before_they_are_scaled() -> None:
    ours = NormedLinear(64, 8, False, 1e-5, dtype=torch.float16, device=CPU)
    ours.weight.fill_(1.0)
    ours.norm.weight.fill_(1.0)
    ours.fold_norm()
    product, epilogue = ours(torch.full((1, 64), 60_000.0, dtype=torch.float16))
    assert bool((epilogue.apply_torch(product) == 64.0).all())


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_adds_that_of_transformers_behind_its_norm(tmp_path: Path, bias: bool) -> None:
    hf = tiny_config(mlp_bias=bias)
    hf.save_pretrained(tmp_path)
    ours = MLP(read_model_config(tmp_path), dtype=torch.float32, device=CPU)
    norm, theirs = randomise(LlamaRMSNorm(hf.hidden_size, hf.rms_norm_eps)), randomise(LlamaMLP(hf))
    assert isinstance(theirs, LlamaMLP)
    ours.gate_up_proj.norm.load_state_dict(norm.state_dict())
    for name in ("weight", "bias")[: 1 + bias]:
        gate_up = torch.cat((getattr(theirs.gate_proj, name), getattr(theirs.up_proj, name)))
        getattr(ours.gate_up_proj, name).data.copy_(gate_up)
        getattr(ours.down_proj, name).data.copy_(getattr(theirs.down_proj, name))
    ours.gate_up_proj.fold_norm()
    hidden = torch.randn(3, hf.hidden_size)
    expected = hidden + theirs(norm(hidden))
    ours(hidden)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-3)
