"""Root-mean-square norm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SIZE = 16384
"""Widest row on a GPU, where one program holds a whole row in registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The norm of each row, times `weight`.

    Normalised in float32, rounded and then multiplied, as in transformers' models.

    Args:
        x: [rows, size]. The stride over rows is free.
        weight: [size], in the dtype of `x`.
        eps: added to the mean square.
        out: like `x`, for the result; it may be `x` itself. None: a new tensor.

    Raises:
        ValueError: on a GPU, rows that are not contiguous or wider than MAX_SIZE.
    """
    if x.is_cuda:
        from kernels.norm_triton import rms_norm_triton  # Triton is not there without a GPU platform.

        return rms_norm_triton(x, weight, eps, out)
    return rms_norm_torch(x, weight, eps, out)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The norm over the last dimension of a tensor of any rank, rounded as `rms_norm` does."""
    values = x.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return torch.mul(normed.to(x.dtype), weight, out=out)
