"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864) in transformers' variants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.rope import rotary_cos_sin

# The frequencies are one set, whatever the length of the sequence.
FIXED_TYPES = ("default", "linear", "llama3", "yarn")
# transformers computes the frequencies anew from the length of the sequence once it passes the original
# one. Keys already in the cache were rotated with the old ones, and rotating them again would take every
# block of a sequence out of sharing; so these types are used up to the original length only.
LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")


def rope_limit(hf: PreTrainedConfig) -> int:
    """The largest total length, in tokens, for which one fixed set of frequencies is right.

    Raises ValueError for a RoPE that the decoder does not compute.
    """
    rope_type = _rope_type(hf)
    if rope_type == "longrope":
        return int(hf.rope_parameters["original_max_position_embeddings"])
    limit = int(hf.max_position_embeddings)
    if rope_type == "yarn":  # models that leave scaling to their users keep the unscaled length in the config
        original = hf.rope_parameters.get("original_max_position_embeddings") or limit
        return max(limit, int(original * hf.rope_parameters["factor"]))
    return limit


def _rope_type(hf: PreTrainedConfig) -> str:
    rope_type = hf.rope_parameters.get("rope_type")
    accepted = FIXED_TYPES + LENGTH_DEPENDENT_TYPES
    if rope_type not in accepted:
        raise ValueError(f"rope_type {rope_type!r} is not supported; accepted are {', '.join(accepted)}")
    partial = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; accepted is 1.0")
    return str(rope_type)


def inverse_frequencies(hf: PreTrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2] on the CPU, in radians a token, and the factor on cos and sin."""
    rope_type = _rope_type(hf)
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (hf.rope_parameters["rope_theta"] ** exponents), 1.0
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf, torch.device("cpu"))
    return frequencies, scaling


class RotaryEmbedding(nn.Module):
    """cos and sin of the positions of one step, shared by all layers."""

    frequencies: Tensor

    def __init__(self, hf: PreTrainedConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        # Always computed on the CPU: powers differ in the last bit between devices.
        frequencies, self.scaling = inverse_frequencies(hf, head_dim)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [tokens, head_dim / 2] of `dtype`, for positions int32 or int64 [tokens]."""
        return rotary_cos_sin(positions, self.frequencies, self.scaling, dtype)
