"""Frequencies, angles and rotation. Without a GPU, Triton's interpreter runs the kernel of the angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.models.rope import RotaryEmbedding, rope_limit
from kernels.rope import rotary_cos_sin, rotate_torch
from tests.interpreted import interpreted
from tests.tiny_models import tiny_config

CPU = torch.device("cpu")
CosSin = Callable[..., tuple[Tensor, Tensor]]
THETA = {"rope_theta": 10000.0}
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, **THETA}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.5] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64,
    **THETA,
}


def _both(rope: dict[str, Any], positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotated random heads [tokens, 2, 32]: ours, and transformers'."""
    hf = tiny_config(rope_parameters=rope, max_position_embeddings=128)
    assert isinstance(hf, LlamaConfig)
    heads = torch.randn(len(positions), 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = rotate_torch(heads, *RotaryEmbedding(hf, 32, CPU)(positions, dtype))
    cos, sin = LlamaRotaryEmbedding(hf)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    return ours, expected[0]


# trap 27
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALED)
def test_rotation_equals_transformers_beyond_the_original_length(kind: str, dtype: torch.dtype) -> None:
    ours, expected = _both(SCALED[kind], torch.tensor([0, 1, 31, 32, 33, 90, 127, 100_000]), dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 128), (LONGROPE, 64)], ids=["dynamic", "longrope"])
def test_length_dependent_rotation_equals_transformers_up_to_its_limit(rope: dict[str, Any], limit: int) -> None:
    ours, expected = _both(rope, torch.arange(limit), torch.float32)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 128), (LONGROPE, 64)], ids=["dynamic", "longrope"])
def test_length_dependent_rotation_is_limited_because_it_changes_early_positions(
    rope: dict[str, Any], limit: int
) -> None:
    assert rope_limit(tiny_config(rope_parameters=rope, max_position_embeddings=128)) == limit
    ours, expected = _both(rope, torch.arange(limit + 1), torch.float32)
    assert not torch.allclose(ours[:limit], expected[:limit], atol=1e-3)


@pytest.mark.parametrize("kind", SCALED)
def test_fixed_rotation_is_good_up_to_max_position_embeddings(kind: str) -> None:
    assert rope_limit(tiny_config(rope_parameters=SCALED[kind], max_position_embeddings=128)) == 128


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "proportional", **THETA}, "'proportional'.*default, linear, llama3, yarn, dynamic, longrope"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}, "partial_rotary_factor 0.5"),
    ],
)
def test_other_rotations_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_limit(tiny_config(rope_parameters=rope))


@pytest.fixture(params=["torch", "triton"])
def cos_sin(request: pytest.FixtureRequest) -> CosSin:
    if request.param == "torch":
        return rotary_cos_sin
    return interpreted("kernels.rope_triton").rotary_cos_sin_triton


# The interpreter cuts bfloat16 off instead of rounding it: tests/gpu covers it.
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("half", [4, 40, 64])
def test_angles_match_the_reference_at_far_positions(
    cos_sin: CosSin, half: int, dtype: torch.dtype, positions: torch.dtype
) -> None:
    position = torch.tensor([0, 1, 2, 3, 5, 8, 4095, 65_537, 131_071, 1_000_003]).to(positions)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, half)
    cos, sin = cos_sin(position, frequencies, 1.25, dtype)
    angles = (position[:, None].float() * frequencies).double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert cos.dtype == sin.dtype == dtype
    torch.testing.assert_close(cos.double(), angles.cos() * 1.25, rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.25, rtol=0, atol=tolerance)


def test_no_tokens_have_no_angles(cos_sin: CosSin) -> None:
    cos, sin = cos_sin(torch.empty(0, dtype=torch.int64), torch.ones(32), 1.0, torch.float32)
    assert cos.shape == sin.shape == (0, 32)
