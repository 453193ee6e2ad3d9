"""The angles of the rotary position embedding as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 8
"""Tokens of one program."""


def rotary_cos_sin_triton(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `kernels.rope.rotary_cos_sin`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos = torch.empty(tokens, half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens:
        _cos_sin_kernel[(triton.cdiv(tokens, _TOKENS),)](
            cos, sin, positions, frequencies, scaling, tokens,
            HALF=half, PADDED_HALF=triton.next_power_of_2(half), TOKENS=_TOKENS,
        )  # fmt: skip
    return cos, sin


# The number of tokens changes from step to step: specialised on, it would compile the kernel again.
@triton.jit(do_not_specialize=["num_tokens"])
def _cos_sin_kernel(
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    scaling: tl.tensor,
    num_tokens: tl.tensor,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One program computes the angles of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.arange(0, PADDED_HALF)
    inside = (token < num_tokens)[:, None] & (element < HALF)[None, :]
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    frequency = tl.load(frequencies + element, mask=element < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    target = token[:, None] * HALF + element[None, :]
    tl.store(cos + target, (tl.cos(angle) * scaling).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + target, (tl.sin(angle) * scaling).to(sin.dtype.element_ty), mask=inside)
