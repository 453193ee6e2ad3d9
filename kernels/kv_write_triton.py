"""Head norms, rotation and K/V write as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_write import HeadNorms

_TILE_HEADS = 8
"""Heads of one program."""
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
) -> None:
    """As `kernels.kv_write.rotate_and_write_kv`, without a result.

    Raises:
        ValueError: a tensor with another layout than the kernel reads.
    """
    _check_layout(qkv, cos, sin, key_cache, value_cache)
    kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    tiles = triton.cdiv(heads, _TILE_HEADS) + triton.cdiv(kv_heads, _TILE_HEADS)
    padded_half = triton.next_power_of_2(head_dim // 2)
    query_weight, key_weight, eps = (norms.query, norms.key, norms.eps) if norms else (None, None, 0.0)
    if qkv.shape[0]:
        _rotate_and_write_kernel[(qkv.shape[0], tiles)](
            qkv, cos, sin, query_weight, key_weight, key_cache, value_cache, slot_mapping,
            eps, qkv.stride(0), *key_cache.stride()[:2],
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PADDED_HALF=padded_half,
            BLOCK_SIZE=key_cache.shape[1], TILE_HEADS=_TILE_HEADS, NORM=norms is not None,
            num_warps=max(1, _TILE_HEADS * padded_half // (32 * _ELEMENTS_PER_THREAD)),
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """One program takes some query heads of one token, or some key heads and the value heads beside them.

    A tile holds the first or the second halves of its heads, so that the elements of a pair meet in one thread.
    Offsets are 64-bit: a cache may hold more than 2^31 elements.
    """
    QUERY_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = qkv + token * qkv_stride
    # Angles and weights are loaded again for every head: from L1, and in the layout of the heads, while one row for
    # all of them would be exchanged between threads.
    element = tl.broadcast_to(tl.arange(0, PADDED_HALF)[None, :], (TILE_HEADS, PADDED_HALF))
    cosines = tl.load(cos + token * HALF + element, mask=element < HALF, other=0.0)
    sines = tl.load(sin + token * HALF + element, mask=element < HALF, other=0.0)
    if tile < QUERY_TILES:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
        inside = (head < HEADS) & (element < HALF)
        queries = row + head * HEAD_DIM + element
        first, second = _rotated(queries, element, inside, cosines, sines, query_weight, eps, HALF, NORM)
        tl.store(queries, first, mask=inside)
        tl.store(queries + HALF, second, mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        head = (tile - QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
        inside = (head < KV_HEADS) & (element < HALF)
        keys = row + (HEADS + head) * HEAD_DIM + element
        values = keys + KV_HEADS * HEAD_DIM
        first_values = tl.load(values, mask=inside)
        second_values = tl.load(values + HALF, mask=inside)
        first, second = _rotated(keys, element, inside, cosines, sines, key_weight, eps, HALF, NORM)
        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
        target += head * HEAD_DIM + element
        written = (head < tl.where(slot >= 0, KV_HEADS, 0)) & (element < HALF)
        tl.store(key_cache + target, first, mask=written)
        tl.store(key_cache + target + HALF, second, mask=written)
        tl.store(value_cache + target, first_values, mask=written)
        tl.store(value_cache + target + HALF, second_values, mask=written)


@triton.jit
def _rotated(
    source: tl.tensor,
    element: tl.tensor,
    inside: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of some heads, normed and rotated. The rotation is rounded once, at its end."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first_factor = tl.load(weight + element, mask=element < HALF, other=0.0).to(tl.float32)
        second_factor = tl.load(weight + HALF + element, mask=element < HALF, other=0.0).to(tl.float32)
        mean_square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        # Rounded before and after the product, as in transformers' models.
        first = ((first * scale).to(dtype).to(tl.float32) * first_factor).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_factor).to(dtype).to(tl.float32)
    cosines, sines = cosines.to(tl.float32), sines.to(tl.float32)
    return (first * cosines - second * sines).to(dtype), (second * cosines + first * sines).to(dtype)
