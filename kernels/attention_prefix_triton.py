"""Attention of decodes to the keys that they share, in plain Triton: each segment is read once for many sequences.

The query heads of consecutive sequences that share a key/value head are packed into the rows of a tile (row = sequence
* group + head), which walks the keys with an online softmax (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.attention_line import SHARE_FIELDS, share_begin
from kernels.attention_prefix_line import first_place, piece_row, place_after
from kernels.attention_prefix_plan import PrefixPieces, PrefixPlan, prefix_pieces, prefix_plan

_FEWEST_TILES = 2
"""Of a share, as for decodes."""
_INTERPRETED_PROGRAMS = 3
"""Where there is no GPU, under Triton's interpreter."""


@dataclass(frozen=True)
class _Tile:
    """Shape of a program's turn; sizes are powers of two that fit the 99 KiB of shared memory of small GPUs."""

    rows: int
    keys: int
    warps: int


# Checked for spilled registers, not tuned: Hopper GPUs have a kernel of their own in half types.
_HALF = _Tile(rows=64, keys=32, warps=4)
_HALF_WIDE = _Tile(rows=32, keys=64, warps=4)
_FLOAT32 = _Tile(rows=32, keys=32, warps=8)
_FLOAT32_WIDE = _Tile(rows=32, keys=16, warps=8)
_STAGES = 2
"""Pipeline stages: one tile of keys less is in flight."""


def _tile(dtype: torch.dtype, padded_dim: int) -> _Tile:
    if dtype == torch.float32:
        return _FLOAT32 if padded_dim <= 128 else _FLOAT32_WIDE
    return _HALF if padded_dim <= 128 else _HALF_WIDE


def plan_prefixes(query: Tensor, key_cache: Tensor, batch: AttentionBatch) -> PrefixPlan | None:
    """The plan for `attend_to_prefixes`, or None if nothing is shared."""
    kv_heads, head_dim = key_cache.shape[2:]
    tile = _tile(query.dtype, triton.next_power_of_2(head_dim))
    tokens = tile.rows // (query.shape[1] // kv_heads)
    programs = _programs(query.device)
    return prefix_plan(batch, kv_heads=kv_heads, keys=tile.keys, tokens=tokens, programs=programs, fewest=_FEWEST_TILES)


def attend_to_prefixes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, plan: PrefixPlan, *, scale: float
) -> PrefixPieces:
    """Results over the segments of `batch.prefixes`, for the decode kernel to merge.

    Grid and scalar arguments depend on shapes alone, so a captured graph may be replayed with other values.

    Args:
        query, key_cache, value_cache, batch, scale: as of `kernels.attention_decode_triton.decode_attention`.
        plan: of `plan_prefixes`.
    """
    assert batch.prefixes is not None
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = query.shape[1]
    padded_dim = triton.next_power_of_2(head_dim)
    tile = _tile(query.dtype, padded_dim)
    pieces = prefix_pieces(batch, plan, heads=heads, kv_heads=kv_heads, padded_dim=padded_dim)
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
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=_STAGES,
        PROGRAMS=plan.programs,
        TOKENS=plan.tokens,
        num_warps=tile.warps,
    )
    return pieces


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


# The tables' width varies between batches: specialised on, it would compile the kernel again.
@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    pieces: tl.tensor,
    statistics: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    records: tl.tensor,
    shares: tl.tensor,
    scale: tl.tensor,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One program walks its share of the line, item after item. `scale` includes log2(e)."""
    program = tl.program_id(0)
    share = shares + program * SHARE_FIELDS
    quotient = tl.load(share)
    remainder = tl.load(share + 1)
    position = share_begin(program, quotient, remainder)
    end = share_begin(program + 1, quotient, remainder)
    place = first_place(records, share)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    while position < end:
        _, sequence_tile, head, tile, tiles, table_row, first_sequence, sequences, first_key, end_key, before = place
        steps = tl.minimum(tiles - tile, end - position)
        member = sequence_tile * TOKENS + row // GROUP
        inside = (row < TOKENS * GROUP) & (member < sequences)
        element = (head * GROUP + row % GROUP) * HEAD_DIM
        query_rows = query + (first_sequence + member).to(tl.int64) * query_stride + element
        query_inside = inside[:, None] & (dim < HEAD_DIM)[None, :]
        queries = tl.load(query_rows[:, None] + dim[None, :], mask=query_inside, other=0.0)

        maximum = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)
        table = block_tables + table_row.to(tl.int64) * table_stride + first_key // BLOCK_SIZE
        for turn in tl.range(0, steps, num_stages=STAGES):
            key = (tiles - 1 - tile - turn) * KEYS + tl.arange(0, KEYS)
            visible = key < end_key - first_key
            block = tl.load(table + key // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
            slot = block * block_stride + key % BLOCK_SIZE * slot_stride + head * head_stride
            key_inside = visible[:, None] & (dim < HEAD_DIM)[None, :]
            key_rows = tl.load(key_cache + slot[:, None] + dim[None, :], mask=key_inside, other=0.0)
            value_rows = tl.load(value_cache + slot[:, None] + dim[None, :], mask=key_inside, other=0.0)
            # Float32 products would be TF32 by default.
            scores = tl.dot(queries, tl.trans(key_rows), input_precision="ieee")
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_maximum[:, None])
            decay = tl.exp2(maximum - new_maximum)
            total = total * decay + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(value_rows.dtype), value_rows, mixed * decay[:, None], input_precision="ieee")
            maximum = new_maximum

        at = piece_row(program, tile == 0, before + member, row // GROUP, head, KV_HEADS, GROUP, PROGRAMS, TOKENS)
        at += row % GROUP
        tl.store(statistics + at * 2, maximum, mask=inside)
        tl.store(statistics + at * 2 + 1, total, mask=inside)
        tl.store(pieces + at[:, None] * PADDED_DIM + dim[None, :], mixed, mask=inside[:, None])
        position += steps
        place = place_after(records, place, steps, KV_HEADS, TOKENS)
