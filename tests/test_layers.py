from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.models.config import read_model_config
from engine.models.layers import MLP, Linear, RMSNorm
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
def test_an_mlp_is_that_of_transformers(tmp_path: Path, bias: bool) -> None:
    hf = tiny_config(mlp_bias=bias)
    hf.save_pretrained(tmp_path)
    ours = MLP(read_model_config(tmp_path), dtype=torch.float32, device=CPU)
    theirs = randomise(LlamaMLP(hf))
    assert isinstance(theirs, LlamaMLP)
    for name in ("weight", "bias")[: 1 + bias]:
        gate_up = torch.cat((getattr(theirs.gate_proj, name), getattr(theirs.up_proj, name)))
        getattr(ours.gate_up_proj, name).data.copy_(gate_up)
        getattr(ours.down_proj, name).data.copy_(getattr(theirs.down_proj, name))
    x = torch.randn(3, hf.hidden_size)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_norm_adds_to_the_residual_and_norms_the_sum() -> None:
    ours = randomise(RMSNorm(64, 1e-5, dtype=torch.float32, device=CPU))
    theirs = LlamaRMSNorm(64, 1e-5)
    theirs.load_state_dict(ours.state_dict())
    x, residual = torch.randn(2, 3, 64)
    total = x + residual
    assert torch.equal(ours(x, residual), theirs(total))
    assert torch.equal(residual, total)
