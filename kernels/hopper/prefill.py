"""Paged prefill attention on a Hopper GPU.

One program stays on each multiprocessor and takes item after item. Its warp groups share the work as in
FlashAttention-3 (arXiv:2407.08608): the producer gathers blocks of keys and values into shared memory, and each
of two consumers attends with query rows of its own.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.attention_batch import AttentionBatch
from kernels.attention_prefill_plan import prefill_tiles
from kernels.hopper.consumer import consume
from kernels.hopper.item import CONSUMERS, ItemShape, item_shape, tokens_per_item
from kernels.hopper.producer import produce
from kernels.hopper.ring import make_ring

_CONSUMER_REGISTERS = 224
_PRODUCER_REGISTERS = 56
"""Of each thread: two consumers and a producer of 128 threads have less than 65,536 registers together."""
_STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, in shared memory."""


def prefill_attention_hopper(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """As `kernels.attention_prefill_triton.prefill_attention`, in float16 or bfloat16."""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    group = query.shape[1] // kv_heads
    tiles = prefill_tiles(batch, query.shape[0], tokens_per_item(group))
    programs = min(_multiprocessors(query.device), tiles.capacity * kv_heads)
    _prefill_kernel[(programs,)](
        output,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        tiles.records,
        tiles.count,
        scale * math.log2(math.e),
        output.stride(0),
        query.stride(0),
        batch.block_tables.stride(0),
        *key_cache.stride()[:3],
        SHAPE=_shape(kv_heads, group, head_dim, block_size, sliding_window or 0),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shape(kv_heads: int, group: int, head_dim: int, block_size: int, window: int) -> ItemShape:
    return item_shape(kv_heads, group, head_dim, block_size, window)


# What changes from step to step would compile the kernel again if it were specialised on.
@gluon.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    output: gl.tensor,
    query: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    block_tables: gl.tensor,
    tiles: gl.tensor,
    num_tiles: gl.tensor,
    scale: gl.tensor,
    output_stride: gl.tensor,
    query_stride: gl.tensor,
    table_stride: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    SHAPE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
) -> None:
    """`tiles` and `num_tiles` are those of `PrefillTiles`; `scale` includes log2(e)."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    queries = make_ring(DTYPE, [CONSUMERS, SHAPE.rows, SHAPE.padded_dim], QUERIES, 1)
    keys = make_ring(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], KEYS, CONSUMERS)
    values = make_ring(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], KEYS, CONSUMERS)
    fence_async_shared()
    num_items = gl.load(num_tiles) * SHAPE.kv_heads
    cache_strides = (block_stride, slot_stride, head_stride)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (queries, keys, values, output, tiles, num_items, scale, output_stride,
                       gl.constexpr(0), SHAPE)),
            (consume, (queries, keys, values, output, tiles, num_items, scale, output_stride,
                       gl.constexpr(1), SHAPE)),
            (produce, (queries, keys, values, query, key_cache, value_cache, block_tables, tiles, num_items,
                       query_stride, table_stride, cache_strides, SHAPE)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
