"""Attention of decodes to the keys that they share, on a Hopper GPU: each segment is read once for many sequences.

As in `kernels.hopper.prefill`, one program stays on each multiprocessor; a producer gathers blocks of keys and values
into shared memory, and each of two consumers attends with query rows of its own. `kernels.attention_prefix_plan` says
which program walks which keys.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention_batch import AttentionBatch
from kernels.attention_prefix_plan import PrefixPieces, PrefixPlan, prefix_pieces, prefix_plan
from kernels.hopper.item import CONSUMERS, ItemShape, item_shape, tokens_per_item
from kernels.hopper.prefix_consumer import consume_prefixes
from kernels.hopper.prefix_producer import produce_prefixes
from kernels.hopper.ring import make_ring

_CONSUMER_REGISTERS = 216
_PRODUCER_REGISTERS = 72
"""Of each thread; the producer keeps a place on the line, and spilled some of it with 56 as for prefill."""
_STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, in shared memory."""
_FEWEST_TILES = 1
"""Of a share: merging many pieces is spread over the programs of the launch that follows."""


def plan_prefixes(query: Tensor, key_cache: Tensor, batch: AttentionBatch) -> PrefixPlan | None:
    """As `kernels.attention_prefix_triton.plan_prefixes`."""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    group = query.shape[1] // kv_heads
    return prefix_plan(
        batch,
        kv_heads=kv_heads,
        keys=_shape(kv_heads, group, head_dim, block_size).keys.value,
        tokens=tokens_per_item(group),
        programs=_multiprocessors(query.device),
        fewest=_FEWEST_TILES,
    )


def attend_to_prefixes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, plan: PrefixPlan, *, scale: float
) -> PrefixPieces:
    """As `kernels.attention_prefix_triton.attend_to_prefixes`, in float16 or bfloat16."""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = query.shape[1]
    padded_dim = triton.next_power_of_2(head_dim)
    pieces = prefix_pieces(batch, plan, heads=heads, kv_heads=kv_heads, padded_dim=padded_dim)
    # Programs may be launched before the kernel ahead has ended: the first thing that they do is to wait for that.
    _prefix_kernel[(plan.programs,)](
        pieces.mixed,
        pieces.statistics,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        plan.records,
        plan.shares,
        scale * math.log2(math.e),
        query.stride(0),
        batch.block_tables.stride(0),
        *key_cache.stride()[:3],
        SHAPE=_shape(kv_heads, heads // kv_heads, head_dim, block_size),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
    return pieces


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shape(kv_heads: int, group: int, head_dim: int, block_size: int) -> ItemShape:
    return item_shape(kv_heads, group, head_dim, block_size, window=0)


# The tables' width varies between batches: specialised on, it would compile the kernel again.
@gluon.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    pieces: gl.tensor,
    statistics: gl.tensor,
    query: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    block_tables: gl.tensor,
    records: gl.tensor,
    shares: gl.tensor,
    scale: gl.tensor,
    query_stride: gl.tensor,
    table_stride: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    SHAPE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
) -> None:
    """`records` and `shares` are those of `PrefixPlan`; `scale` includes log2(e)."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    gdc_wait()
    # The launch that follows may begin with what does not need these results, where a multiprocessor is free.
    gdc_launch_dependents()
    queries = make_ring(DTYPE, [CONSUMERS, SHAPE.rows, SHAPE.padded_dim], QUERIES, 1)
    keys = make_ring(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], KEYS, CONSUMERS)
    values = make_ring(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], KEYS, CONSUMERS)
    fence_async_shared()
    line = (records, shares)
    cache_strides = (block_stride, slot_stride, head_stride)
    # fmt: off
    gl.warp_specialize(
        [
            (consume_prefixes, (queries, keys, values, pieces, statistics, line, scale, DTYPE, gl.constexpr(0), SHAPE)),
            (consume_prefixes, (queries, keys, values, pieces, statistics, line, scale, DTYPE, gl.constexpr(1), SHAPE)),
            (produce_prefixes, (queries, keys, values, query, key_cache, value_cache, block_tables, line,
                                query_stride, table_stride, cache_strides, SHAPE)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
