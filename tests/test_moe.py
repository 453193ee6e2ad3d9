"""A mixture of experts against transformers' own, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.models.config import read_model_config
from engine.models.moe import SparseMLP
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 8}),
    ("qwen3_moe", {"num_experts_per_tok": 1}),
    ("mixtral", {}),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
]


def _pair(folder: Path, family: str, overrides: dict[str, Any]) -> tuple[nn.Sequential, SparseMLP]:
    """Layer 0's norm and mixture of a random transformers model, and ours with their weights."""
    model = tiny_model(family, **overrides)
    model.config.save_pretrained(folder)
    norm, theirs = model.model.layers[0].post_attention_layernorm, model.model.layers[0].mlp
    ours = SparseMLP(read_model_config(folder), dtype=torch.float32, device=CPU)
    ours.norm.weight.data = norm.weight.data
    ours.router.weight.data = theirs.gate.weight.data
    ours.gate_up.data = theirs.experts.gate_up_proj.data
    ours.down.data = theirs.experts.down_proj.data
    return nn.Sequential(norm, theirs), ours


def _no_counts(mlp: SparseMLP) -> Tensor:
    return torch.zeros(len(mlp.down), dtype=torch.int32)


def _hidden(tokens: int) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("family", "overrides"), CASES)
@torch.inference_mode()
def test_what_is_added_equals_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    theirs, ours = _pair(tmp_path, family, overrides)
    hidden = _hidden(37)
    expected = hidden + theirs(hidden[None])[0]
    ours(hidden, torch.arange(37), _no_counts(ours))
    assert (hidden - expected).norm() / expected.norm() < 1e-5


# trap 22
@torch.inference_mode()
def test_padding_stays_and_changes_no_other_token(tmp_path: Path) -> None:
    _, ours = _pair(tmp_path, "qwen3_moe", {})
    expected, hidden, slots = _hidden(8), _hidden(8), torch.arange(8)
    ours(expected, slots, _no_counts(ours))
    slots[[2, 7]] = -1
    hidden[2], hidden[7] = torch.nan, 3.0
    ours(hidden, slots, _no_counts(ours))
    real = slots >= 0
    torch.testing.assert_close(hidden[real], expected[real])
    assert bool((hidden[7] == 3.0).all())


def test_parameters_take_no_gradient(tmp_path: Path) -> None:
    _, ours = _pair(tmp_path, "mixtral", {})
    assert {name for name, _ in ours.named_parameters()} == {"norm.weight", "router.weight", "gate_up", "down"}
    assert not any(parameter.requires_grad for parameter in ours.parameters())
