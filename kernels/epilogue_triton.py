"""The epilogue of a product inside the Triton kernels that read it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.epilogue import Epilogue

MANY_TOKENS = 512
"""From here on they fill the device with fewer, wider programs, and fewer programs read the same row again."""
_MAX_PART = 4096
"""Elements of a row that a program holds at a time; they take 32 registers of each thread of four warps."""


def epilogue_arguments(epilogue: Epilogue) -> dict[str, Any]:
    """Arguments of a kernel for `row_scale` and, as `bias`, for `load_or`.

    Raises:
        ValueError: rows or a bias that are not contiguous.
    """
    rows, bias = epilogue.rows, epilogue.bias
    for name, tensor in (("rows", rows), ("bias", bias)):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its last dimension must be contiguous")
    size = 1 if rows is None else rows.shape[1]
    return {
        "rows": rows,
        "rows_stride": 0 if rows is None else rows.stride(0),
        "rows_eps": epilogue.eps,
        "bias": bias,
        "SIZE": size,
        "PART": min(_MAX_PART, triton.next_power_of_2(size)),
    }


@triton.jit
def row_scale(
    rows: tl.tensor,
    token: tl.tensor,
    rows_stride: tl.tensor,
    rows_eps: tl.tensor,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """The inverse root mean square of a token's row; 1 without rows.

    It exchanges data between threads: what a program loads before it is on its way meanwhile.
    """
    scale = 1.0
    if rows is not None:
        squares = tl.zeros((PART,), tl.float32)
        for start in tl.static_range(0, SIZE, PART):
            element = start + tl.arange(0, PART)
            values = tl.load(rows + token * rows_stride + element, mask=element < SIZE, other=0.0).to(tl.float32)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares) / SIZE + rows_eps)
    return scale


@triton.jit
def load_or(pointer: tl.tensor, offset: tl.tensor, mask: tl.tensor, default: tl.constexpr) -> tl.tensor:
    """float32 values of a tensor; `default` if there is none."""
    values = default
    if pointer is not None:
        values = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    return values
