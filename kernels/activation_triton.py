"""The gate of a gated MLP as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.epilogue import NO_EPILOGUE, Epilogue
from kernels.epilogue_triton import MANY_TOKENS, epilogue_arguments, load_or, row_scale

_BLOCK = 1024
"""Elements of one program."""
_WARPS = 4
"""With _BLOCK elements of two bytes, one access of 16 bytes for each thread."""
_WIDE_BLOCK = 16384
"""At most so many for many tokens: a program that takes a whole token reads its row but once."""
_WIDE_WARP = 512
"""Elements of a warp of such a program."""


def silu_and_mul_triton(gate_up: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    """As `kernels.activation.silu_and_mul`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}: its last dimension must be contiguous")
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    block, warps = _BLOCK, _WARPS
    if tokens >= MANY_TOKENS:
        block = min(triton.next_power_of_2(inner), _WIDE_BLOCK)
        warps = max(1, block // _WIDE_WARP)
    if tokens:
        _silu_and_mul_kernel[(tokens, triton.cdiv(inner, block))](
            out, gate_up, gate_up.stride(0), **epilogue_arguments(epilogue), INNER=inner, BLOCK=block, num_warps=warps
        )
    return out


@triton.jit
def _silu_and_mul_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    gate_up_stride: tl.tensor,
    rows: tl.tensor,
    rows_stride: tl.tensor,
    rows_eps: tl.tensor,
    bias: tl.tensor,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program computes a part of one token."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < INNER
    source = gate_up + token * gate_up_stride + element
    gate = tl.load(source, mask=inside).to(tl.float32)
    up = tl.load(source + INNER, mask=inside).to(tl.float32)
    gate_bias = load_or(bias, element, inside, 0.0)
    up_bias = load_or(bias, INNER + element, inside, 0.0)
    scale = row_scale(rows, token, rows_stride, rows_eps, SIZE, PART)
    gate = gate * scale + gate_bias
    up = up * scale + up_bias
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + token * INNER + element, product.to(out.dtype.element_ty), mask=inside)
