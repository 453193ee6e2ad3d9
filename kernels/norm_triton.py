"""Residual sum and root-mean-square norm as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm import MAX_SIZE

_ELEMENTS_PER_THREAD = 8
"""Two bytes each, they make one access of 16 bytes."""
_MAX_WARPS = 16


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """As `kernels.norm.add_rms_norm`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} elements: at most {MAX_SIZE} are supported")
    if out is None:
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its last dimension must be contiguous")
    if rows:
        padded_size = triton.next_power_of_2(size)
        _add_rms_norm_kernel[(rows,)](
            out, x, residual, weight, eps, out.stride(0), x.stride(0), residual.stride(0),
            SIZE=size, PADDED_SIZE=padded_size,
            num_warps=min(_MAX_WARPS, max(1, padded_size // (32 * _ELEMENTS_PER_THREAD))),
        )  # fmt: skip
    return out


@triton.jit
def _add_rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out_stride: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:
    """One program computes one row. All loads come before the first use, so that they wait together."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED_SIZE)
    inside = element < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    addend = tl.load(x + row * x_stride + element, mask=inside, other=0.0)
    previous = tl.load(residual + row * residual_stride + element, mask=inside, other=0.0)
    factor = tl.load(weight + element, mask=inside, other=0.0)
    total = (previous.to(tl.float32) + addend.to(tl.float32)).to(dtype)
    tl.store(residual + row * residual_stride + element, total, mask=inside)
    values = total.to(tl.float32)
    normed = (values * tl.rsqrt(tl.sum(values * values) / SIZE + eps)).to(dtype)
    product = normed.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * out_stride + element, product.to(dtype), mask=inside)
