"""Head norms, rotation and K/V write as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels import hopper
from kernels.epilogue import NO_EPILOGUE, Epilogue
from kernels.epilogue_triton import MANY_TOKENS, epilogue_arguments, load_or, row_scale
from kernels.kv_write import HeadNorms

_TILE_HEADS = 8
"""Heads of a tile, of which a program takes one."""
_WIDE_TILE = 1024
"""Elements of each half of a tile's heads for many tokens, where a program takes all tiles of its token."""
_ELEMENTS_PER_THREAD = 8
"""Of each half of a head; two bytes each, they make one access of 16 bytes."""


def rotate_and_write_kv_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """As `kernels.kv_write.rotate_and_write_kv`, without a result.

    Raises:
        ValueError: a tensor with another layout than the kernel reads.
    """
    _check_layout(qkv, cos, sin, key_cache, value_cache)
    kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    padded_half = triton.next_power_of_2(head_dim // 2)
    tokens = qkv.shape[0]
    many = tokens >= MANY_TOKENS
    tile_heads = max(_TILE_HEADS, _WIDE_TILE // padded_half) if many else _TILE_HEADS
    tiles = triton.cdiv(heads, tile_heads) + triton.cdiv(kv_heads, tile_heads)
    query_weight, key_weight, eps = (norms.query, norms.key, norms.eps) if norms else (None, None, 0.0)
    if tokens:
        _rotate_and_write_kernel[(tokens, 1 if many else tiles)](
            qkv, cos, sin, query_weight, key_weight, key_cache, value_cache, slot_mapping,
            eps, qkv.stride(0), *key_cache.stride()[:2], **epilogue_arguments(epilogue),
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PADDED_HALF=padded_half,
            BLOCK_SIZE=key_cache.shape[1], TILE_HEADS=tile_heads, TILES=tiles if many else 1,
            ATTENTION_WAITS=hopper.serves(qkv),
            num_warps=max(1, tile_heads * padded_half // (32 * _ELEMENTS_PER_THREAD)),
        )  # fmt: skip


def _check_layout(qkv: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if qkv.stride(1) != 1:
        raise ValueError(f"qkv has strides {qkv.stride()}: its last dimension must be contiguous")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.stride()[-2:] != (tensor.shape[-1], 1):
            raise ValueError(f"{name} has strides {tensor.stride()}: its last two dimensions must be contiguous")
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"key_cache has strides {key_cache.stride()}, value_cache {value_cache.stride()}: not equal")


@triton.jit
def _rotate_and_write_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    rows: tl.tensor,
    rows_stride: tl.tensor,
    rows_eps: tl.tensor,
    bias: tl.tensor,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILES: tl.constexpr,
    ATTENTION_WAITS: tl.constexpr,
) -> None:
    """One program takes a tile of one token, or all its TILES: some query heads, or key heads and their value heads.

    A tile holds the first or the second halves of its heads, so that the elements of a pair meet in one thread.
    All loads of the first tile come before the scale of its row. Offsets are 64-bit: a cache may hold more than
    2^31 elements. ATTENTION_WAITS: the attention kernel that follows may start early, as it waits for this one to end.
    """
    QUERY_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    if ATTENTION_WAITS:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * qkv_stride
    slot = tl.load(slot_mapping + token)
    # Angles and weights are loaded again for every head: from L1, and in the layout of the heads, while one row for
    # all of them would be exchanged between threads.
    element = tl.broadcast_to(tl.arange(0, PADDED_HALF)[None, :], (TILE_HEADS, PADDED_HALF))
    within = element < HALF
    cosines = tl.load(cos + token * HALF + element, mask=within, other=0.0).to(tl.float32)
    sines = tl.load(sin + token * HALF + element, mask=within, other=0.0).to(tl.float32)
    for turn in tl.static_range(TILES):
        tile = tl.program_id(1) if TILES == 1 else turn
        if tile < QUERY_TILES:
            head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
            inside = (head < HEADS) & within
            column = head * HEAD_DIM + element
            first, second = _load_halves(row, column, inside, 0.0, HALF)
            first_bias, second_bias = _load_halves(bias, column, inside, 0.0, HALF)
            first_weight, second_weight = _load_halves(query_weight, element, within, 1.0, HALF)
            if turn == 0:
                scale = row_scale(rows, token, rows_stride, rows_eps, SIZE, PART)
            first, second = first * scale + first_bias, second * scale + second_bias
            if query_weight is not None:
                first, second = _normed(first, second, first_weight, second_weight, eps, HALF)
            first, second = first * cosines - second * sines, second * cosines + first * sines
            _store_halves(row + column, first, second, inside, HALF)
        else:
            head = (tile - QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
            inside = (head < KV_HEADS) & within
            column = (HEADS + head) * HEAD_DIM + element
            value_column = column + KV_HEADS * HEAD_DIM
            first, second = _load_halves(row, column, inside, 0.0, HALF)
            first_bias, second_bias = _load_halves(bias, column, inside, 0.0, HALF)
            first_weight, second_weight = _load_halves(key_weight, element, within, 1.0, HALF)
            first_value, second_value = _load_halves(row, value_column, inside, 0.0, HALF)
            first_value_bias, second_value_bias = _load_halves(bias, value_column, inside, 0.0, HALF)
            if turn == 0:
                scale = row_scale(rows, token, rows_stride, rows_eps, SIZE, PART)
            first, second = first * scale + first_bias, second * scale + second_bias
            if key_weight is not None:
                first, second = _normed(first, second, first_weight, second_weight, eps, HALF)
            first, second = first * cosines - second * sines, second * cosines + first * sines
            target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
            target += head * HEAD_DIM + element
            written = (head < tl.where(slot >= 0, KV_HEADS, 0)) & within
            _store_halves(key_cache + target, first, second, written, HALF)
            first_value, second_value = first_value * scale + first_value_bias, second_value * scale + second_value_bias
            _store_halves(value_cache + target, first_value, second_value, written, HALF)


@triton.jit
def _load_halves(
    pointer: tl.tensor, offset: tl.tensor, mask: tl.tensor, default: tl.constexpr, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of some heads in float32; `default` if there is no tensor."""
    return load_or(pointer, offset, mask, default), load_or(pointer, offset + HALF, mask, default)


@triton.jit
def _store_halves(pointer: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> None:
    dtype: tl.constexpr = pointer.dtype.element_ty
    tl.store(pointer, first.to(dtype), mask=mask)
    tl.store(pointer + HALF, second.to(dtype), mask=mask)


@triton.jit
def _normed(
    first: tl.tensor,
    second: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
    return first * scale * first_weight, second * scale * second_weight
