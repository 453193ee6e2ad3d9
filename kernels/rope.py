"""Rotary position embedding (https://arxiv.org/abs/2104.09864): its angles and its rotation."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_cos_sin(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, times `scaling`; each [tokens, head_dim / 2] of `dtype`.

    Angles are float32: at dtype's precision, far positions would fall together.

    Args:
        positions: int64 or int32 [tokens].
        frequencies: float32 [head_dim / 2], in radians a token.
        scaling: factor of both.
        dtype: of the result.
    """
    if positions.is_cuda:
        from kernels.rope_triton import rotary_cos_sin_triton  # Triton is not there without a GPU platform.

        return rotary_cos_sin_triton(positions, frequencies, scaling, dtype)
    angles = positions[:, None].float() * frequencies
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate_torch(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [tokens, heads, head_dim]; element i pairs with i + head_dim / 2, as in transformers' models."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
