"""Root-mean-square norm as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm import MAX_SIZE

_ELEMENTS_PER_THREAD = 8
"""Two bytes each, they make one access of 16 bytes."""
_MAX_WARPS = 16


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """As `kernels.norm.rms_norm`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} elements: at most {MAX_SIZE} are supported")
    if out is None:
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its last dimension must be contiguous")
    if rows:
        padded_size = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            out, x, weight, eps, out.stride(0), x.stride(0),
            SIZE=size, PADDED_SIZE=padded_size,
            num_warps=min(_MAX_WARPS, max(1, padded_size // (32 * _ELEMENTS_PER_THREAD))),
        )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out_stride: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:
    """One program computes one row. Both loads come before the first use, so that they wait together."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED_SIZE)
    inside = element < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * x_stride + element, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    normed = (values * tl.rsqrt(tl.sum(values * values) / SIZE + eps)).to(dtype)
    tl.store(out + row * out_stride + element, (normed.to(tl.float32) * factor).to(dtype), mask=inside)
