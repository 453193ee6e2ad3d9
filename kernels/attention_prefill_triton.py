"""Paged attention of prefill chunks: on a Hopper GPU the kernel made for it, elsewhere one in plain Triton.

The query heads that share a key/value head are packed with several tokens into the rows of a tile (row =
token * group + head), which walks the keys with an online softmax (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper
from kernels.attention_batch import AttentionBatch
from kernels.attention_prefill_plan import prefill_tiles


@dataclass(frozen=True)
class _Tile:
    """Shape of one program's work; sizes are powers of two that fit the 99 KiB of shared memory of small GPUs."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Fill `output` for every sequence with more than one query token; the rows of all others keep what they hold.

    Grid and scalar arguments depend on shapes and on the integers of `batch` alone, so a captured graph may be
    replayed with other lengths.

    Args:
        output: [tokens, heads, head_dim] in the dtype of `query`; like `query`, with any stride over tokens.
        query, key_cache, value_cache, scale, sliding_window: as of `kernels.attention.paged_attention`.
            Both caches have the same strides.
        batch: keeps the plan of the step for the layers to come.
    """
    if batch.max_query_len <= 1:
        return
    if hopper.serves(query):
        from kernels.hopper.prefill import prefill_attention_hopper  # Gluon cannot be imported where it cannot run.

        prefill_attention_hopper(
            output, query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window
        )
        return
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    group = query.shape[1] // kv_heads
    tile = _choose_tile(query.dtype, triton.next_power_of_2(head_dim))
    tiles = prefill_tiles(batch, query.shape[0], tile.rows // group)
    _attention_kernel[(tiles.capacity * kv_heads,)](
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
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def _choose_tile(dtype: torch.dtype, padded_dim: int) -> _Tile:
    if dtype == torch.float32:
        # IEEE products have no tensor cores: the operands lie in registers, and a larger tile would spill them.
        return _Tile(rows=16, keys=32, warps=4, stages=1)
    if padded_dim > 128:
        return _Tile(rows=64, keys=32, warps=8, stages=2)
    return _Tile(rows=128, keys=64, warps=8, stages=2)


# What changes from step to step would compile the kernel again if it were specialised on.
@triton.jit(do_not_specialize=["table_stride"])
def _attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    scale: tl.tensor,
    output_stride: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program computes one tile of queries of one key/value head. `scale` includes log2(e); WINDOW 0 is none.

    `tiles` and `num_tiles` are those of `PrefillTiles`. Neighbouring programs share a tile's sequence.
    """
    tile = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    if tile >= tl.load(num_tiles):
        return
    record = tiles + tile * 4
    table = block_tables + tl.load(record).to(tl.int64) * table_stride
    query_begin = tl.load(record + 1)
    first_position = tl.load(record + 2)
    tokens = tl.load(record + 3)
    last = first_position + tokens - 1

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    position = first_position + row // GROUP
    inside = (row < tokens * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    index = (query_begin + row // GROUP).to(tl.int64)[:, None]
    element = ((kv_head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(query + index * query_stride + element, mask=inside, other=0.0)

    keys = key_cache + kv_head * head_stride
    values = value_cache + kv_head * head_stride
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)

    # Tiles of keys before `whole_from` may hold some that have left a row's window, tiles from `whole_until`
    # on some that come after a row's position. All bounds are multiples of KEYS.
    start = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
    whole_from = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), KEYS) * KEYS if WINDOW > 0 else 0
    whole_until = (first_position + 1) // KEYS * KEYS
    blocks = _load_blocks(table, start, last, BLOCK_SIZE, KEYS)
    for at in tl.range(start, last + 1, KEYS, num_stages=STAGES):
        slots = _slots(blocks, at, last, block_stride, slot_stride, BLOCK_SIZE, KEYS)
        key_rows = _gather(keys, slots, HEAD_DIM, PADDED_DIM, KEYS)
        value_rows = _gather(values, slots, HEAD_DIM, PADDED_DIM, KEYS)
        # An iteration ahead: the gather need not wait for the entries of the block table.
        blocks = _load_blocks(table, at + KEYS, last, BLOCK_SIZE, KEYS)

        # Float32 products would be TF32 by default.
        scores = tl.dot(queries, tl.trans(key_rows), input_precision="ieee")
        if (at >= whole_until) | (at < whole_from):
            distance = position[:, None] - (at + tl.arange(0, KEYS))[None, :]
            visible = distance >= 0
            if WINDOW > 0:
                visible &= distance < WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        # With a window, a row may have seen no key yet; its maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if WINDOW > 0 else new_maximum
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(maximum - shift)
        maximum = new_maximum
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value_rows.dtype), value_rows, mixed * decay[:, None], input_precision="ieee")

    result = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + index * output_stride + element, result, mask=inside)


@triton.jit
def _load_blocks(
    table: tl.tensor, at: tl.tensor, last: tl.tensor, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """Ids of the blocks of a tile of keys, [blocks]; no entry after that of position `last` is read."""
    BLOCKS: tl.constexpr = max(KEYS // BLOCK_SIZE, 1)
    return tl.load(table + tl.minimum(at // BLOCK_SIZE + tl.arange(0, BLOCKS), last // BLOCK_SIZE))


@triton.jit
def _slots(
    blocks: tl.tensor,
    at: tl.tensor,
    last: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Where the slots of a tile of keys begin, int64 [blocks, slots]. Those after position `last`, which may hold
    NaN, are replaced by the slot of `last`: their weight is 0."""
    SLOTS: tl.constexpr = min(KEYS, BLOCK_SIZE)
    BLOCKS: tl.constexpr = KEYS // SLOTS
    key = tl.arange(0, BLOCKS)[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    offset = tl.minimum(at + key, last) % BLOCK_SIZE
    return (blocks.to(tl.int64) * block_stride)[:, None] + offset * slot_stride


@triton.jit
def _gather(
    cache: tl.tensor, slots: tl.tensor, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """Rows [KEYS, PADDED_DIM] of `cache`. Loaded by blocks, the addresses take few registers."""
    dim = tl.arange(0, PADDED_DIM)
    pointers = cache + slots[:, :, None] + dim[None, None, :]
    if HEAD_DIM < PADDED_DIM:
        rows = tl.load(pointers, mask=(dim < HEAD_DIM)[None, None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return tl.reshape(rows, (KEYS, PADDED_DIM))
