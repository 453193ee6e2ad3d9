"""The gate of a gated MLP as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements of one program."""
_WARPS = 4
"""With _BLOCK elements of two bytes, one access of 16 bytes for each thread."""


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """As `kernels.activation.silu_and_mul`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}: its last dimension must be contiguous")
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_and_mul_kernel[(tokens, triton.cdiv(inner, _BLOCK))](
            out, gate_up, gate_up.stride(0), INNER=inner, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out


@triton.jit
def _silu_and_mul_kernel(
    out: tl.tensor, gate_up: tl.tensor, gate_up_stride: tl.tensor, INNER: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program computes a part of one token."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < INNER
    source = gate_up + token * gate_up_stride + element
    gate = tl.load(source, mask=inside).to(tl.float32)
    up = tl.load(source + INNER, mask=inside)
    activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * INNER + element, product.to(up.dtype), mask=inside)
