"""Paged attention of sequences with one query token on a Hopper GPU.

As in `kernels.attention_decode_triton`, every program walks its share of a line of key tiles. A product of a warp group
has at least 64 rows, which a few query heads would not fill: here the keys are the rows of the first product and the
head dimensions those of the second, and the query heads that share a key/value head are the columns of both. So both
products read keys and values where they were copied to.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from kernels.attention_batch import AttentionBatch
from kernels.attention_decode_plan import decode_plan, part_space
from kernels.attention_line import SHARE_FIELDS, share_begin
from kernels.hopper.decode_copy import load_blocks, start_copies
from kernels.hopper.decode_line import is_visible, next_place
from kernels.hopper.decode_parts import arrive, leave_part, part_size
from kernels.hopper.decode_prefix import add_pieces, load_first_piece, load_merge
from kernels.hopper.decode_shape import DecodeShape, decode_shape
from kernels.hopper.prefix import attend_to_prefixes, plan_prefixes
from kernels.hopper.ring import thread_barrier

# Measured on one H200 (all of it in benchmarks/results/tiles_decode.jsonl): microseconds of 1 sequence x 2048, 256 x
# 512, 64 x 8192 and 1 x 131072 keys with groups of 4, and of 256 x 1000 with groups of 2 (bfloat16, head_dim 128).
#
#     keys of a tile  stages  programs   1x2048  256x512  64x8192  1x131072  256x1000
#                 64       3         2      8.7      132      493       132       245
#                128       3         1      8.2      134      561       136       250
#                 64       6         1      8.8      140      617       163       259
_STAGES = gl.constexpr(3)
"""Tiles in shared memory: two are on their way while one is attended to."""
_FEWEST_TILES = 2
"""Of a share: with fewer, merging takes longer than reading (8.3 against 10.4 us for 2,048 keys)."""
_TILES_IN_MEMORY = 6
"""Tiles of 32 KiB, those of all programs, for which a multiprocessor's shared memory has room."""
_TILE_BYTES = 2 * 64 * 128 * 2
"""Keys and values of a tile whose heads have up to 128 dimensions."""


def decode_attention_hopper(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """As `kernels.attention_decode_triton.decode_attention`, in float16 or bfloat16."""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    shape = _shape(kv_heads, query.shape[1] // kv_heads, head_dim, block_size, sliding_window or 0)
    programs = _programs(query.device, shape)
    prefix = None if sliding_window else plan_prefixes(query, key_cache, batch)
    plan = decode_plan(
        batch,
        kv_heads=kv_heads,
        block_size=block_size,
        sliding_window=sliding_window,
        keys=shape.keys.value,
        programs=programs,
        fewest=_FEWEST_TILES,
        prefix=prefix,
    )
    # Both plans come before: the programs below read theirs while the prefixes are still being attended to.
    pieces = attend_to_prefixes(query, key_cache, value_cache, batch, prefix, scale=scale) if prefix else None
    _decode_kernel[(programs,)](
        output,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        plan.decodes,
        plan.shares,
        plan.arrivals,
        part_space(query.device, programs * 2 * part_size(shape)),
        (plan.merges, prefix.shares, pieces.mixed, pieces.statistics) if prefix and pieces else None,
        scale * math.log2(math.e),
        output.stride(0),
        query.stride(0),
        *key_cache.stride()[:3],
        SHAPE=shape,
        PREFIX_PROGRAMS=prefix.programs if prefix else 0,
        PREFIX_TOKENS=prefix.tokens if prefix else 0,
        num_warps=4,
        launch_pdl=True,
    )


@functools.cache
def _programs(device: torch.device, shape: DecodeShape) -> int:
    """As many programs as the GPU holds at a time."""
    tile_bytes = 2 * shape.keys.value * shape.padded_dim.value * 2
    resident = _TILES_IN_MEMORY * _TILE_BYTES // (_STAGES.value * tile_bytes)
    return int(torch.cuda.get_device_properties(device).multi_processor_count * resident)


@functools.cache
def _shape(kv_heads: int, group: int, head_dim: int, block_size: int, window: int) -> DecodeShape:
    return decode_shape(kv_heads, group, head_dim, block_size, window)


@gluon.jit
def _decode_kernel(
    output: gl.tensor,
    query: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    block_tables: gl.tensor,
    decodes: gl.tensor,
    shares: gl.tensor,
    arrivals: gl.tensor,
    parts: gl.tensor,
    prefix: gl.tuple,
    scale: gl.tensor,
    output_stride: gl.tensor,
    query_stride: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    SHAPE: gl.constexpr,
    PREFIX_PROGRAMS: gl.constexpr,
    PREFIX_TOKENS: gl.constexpr,
) -> None:
    """One program walks its share of the line. `scale` includes log2(e).

    The tiles of one sequence and key/value head are a segment. One that lies within the share is written out. Of a
    cut one, every program leaves its part, and the last to arrive merges the parts, in their order along the line.
    A share cuts at most two: the segment in which it begins (part 0) and the one in which it ends (part 1).
    The part with the end of a segment takes in what the launch ahead has found out about the prefixes of its sequence:
    the results of that one are waited for only there.
    """
    DTYPE: gl.constexpr = query.dtype.element_ty
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.rows, 16])
    if PREFIX_PROGRAMS == 0:
        gdc_wait()
    program = gl.program_id(0)
    share = shares + program * SHARE_FIELDS
    quotient = gl.load(share)
    remainder = gl.load(share + 1)
    begin = share_begin(program, quotient, remainder)
    end = share_begin(program + 1, quotient, remainder)
    place = (
        begin,
        gl.load(share + 2),
        gl.load(share + 3),
        gl.load(share + 4),
        gl.load(share + 5),
        gl.load(share + 6),
        gl.load(share + 7),
        gl.load(share + 8),
    )

    keys = gl.allocate_shared_memory(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], TILES)
    values = gl.allocate_shared_memory(DTYPE, [_STAGES, SHAPE.blocks, SHAPE.slots, SHAPE.padded_dim], TILES)
    queries = gl.allocate_shared_memory(DTYPE, [_STAGES, SHAPE.rows, SHAPE.padded_dim], ROWS)
    weight_rows = gl.allocate_shared_memory(DTYPE, [SHAPE.rows, SHAPE.keys], ROWS)
    buffers = (keys, values, queries)
    tensors = (query, key_cache, value_cache)
    strides = (query_stride, block_stride, slot_stride, head_stride)

    # Copies run ahead of the products: they have a place of their own, and look up its blocks a turn before.
    copied = place
    blocks = load_blocks(block_tables, copied, SHAPE)
    for turn in gl.static_range(_STAGES - 1):
        if copied[0] < end:
            following = next_place(decodes, copied, SHAPE)
            next_blocks = load_blocks(block_tables, following, SHAPE)
            start_copies(buffers, turn, tensors, strides, copied, blocks, SHAPE)
            copied = following
            blocks = next_blocks
        async_copy.commit_group()

    stage = begin * 0
    maximum, total, mixed = _nothing_seen(PRODUCT, SHAPE)
    if PREFIX_PROGRAMS > 0:
        merge = load_merge(prefix, place[1])
    while place[0] < end:
        position, index, head, tile, tiles, token, _, _ = place
        ends = tile + 1 == tiles
        if PREFIX_PROGRAMS > 0:
            if ends:
                gdc_wait()
            first_piece = load_first_piece(prefix, merge, head, ends, PRODUCT, PREFIX_PROGRAMS, PREFIX_TOKENS, SHAPE)
        async_copy.wait_group(_STAGES - 2)
        thread_barrier()  # The tile is there for all threads, and none reads the tile before any more.
        fence_async_shared()  # The copies write as threads do; the tensor cores read through another proxy.
        scores = _scores(keys.index(stage), queries.index(stage), place, PRODUCT, SHAPE)
        new_maximum = gl.maximum(maximum, gl.max(scores, 0) * scale)

        if copied[0] < end:
            before = gl.where(stage == 0, _STAGES - 1, stage - 1)
            start_copies(buffers, before, tensors, strides, copied, blocks, SHAPE)
            copied = next_place(decodes, copied, SHAPE)
            blocks = load_blocks(block_tables, copied, SHAPE)
        async_copy.commit_group()

        weights = gl.exp2(scores * scale - new_maximum[None, :])
        decay = gl.exp2(maximum - new_maximum)[None, :]
        maximum = new_maximum
        total = total * decay + weights
        mixed = _mix(mixed * decay, weights, weight_rows, values.index(stage), SHAPE)

        if ends | (position + 1 == end):
            sums = gl.sum(total, 0)
            if PREFIX_PROGRAMS > 0 and ends:
                maximum, sums, mixed = add_pieces(
                    maximum, sums, mixed, first_piece, prefix, merge, index, head,
                    PREFIX_PROGRAMS, PREFIX_TOKENS, SHAPE,
                )  # fmt: skip
            segment = position - tile
            if ends & (segment >= begin):
                to = output + token.to(gl.int64) * output_stride + head * (SHAPE.group * SHAPE.head_dim)
                _write(to, mixed / sums[None, :], SHAPE)
            else:
                leave_part(parts, 2 * program + (segment >= begin).to(gl.int32), maximum, sums, mixed, SHAPE)
                arrive(output, arrivals, parts, place, segment, quotient, remainder, output_stride, SHAPE)
            maximum, total, mixed = _nothing_seen(PRODUCT, SHAPE)
        place = next_place(decodes, place, SHAPE)
        if PREFIX_PROGRAMS > 0 and place[1] != index:
            merge = load_merge(prefix, place[1])
        stage = gl.where(stage == _STAGES - 1, 0, stage + 1)
    if PREFIX_PROGRAMS > 0:
        gdc_wait()  # What follows this kernel relies on the one ahead, too.


@gluon.jit
def _nothing_seen(PRODUCT: gl.constexpr, SHAPE: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Running maximum [rows], sum for each key of a tile [keys, rows], and mixed values [padded_dim, rows]."""
    maximum = gl.full([SHAPE.rows], float("-inf"), gl.float32, layout=gl.SliceLayout(0, PRODUCT))
    total = gl.zeros([SHAPE.keys, SHAPE.rows], gl.float32, layout=PRODUCT)
    mixed = gl.zeros([SHAPE.padded_dim, SHAPE.rows], gl.float32, layout=PRODUCT)
    return maximum, total, mixed


@gluon.jit
def _scores(
    keys: gl.shared_memory_descriptor,
    queries: gl.shared_memory_descriptor,
    place: gl.tuple,
    PRODUCT: gl.constexpr,
    SHAPE: gl.constexpr,
) -> gl.tensor:
    """Products [keys, rows] of the keys of a tile and its queries; -inf for keys that they do not see."""
    scores = gl.zeros([SHAPE.keys, SHAPE.rows], gl.float32, layout=PRODUCT)
    key_rows = keys.reshape([SHAPE.keys, SHAPE.padded_dim])
    scores = warpgroup_mma(key_rows, queries.permute([1, 0]), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    key = gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(1, PRODUCT))
    return gl.where(is_visible(key, place, SHAPE)[:, None], scores, float("-inf"))


@gluon.jit
def _mix(
    mixed: gl.tensor,
    weights: gl.tensor,
    weight_rows: gl.shared_memory_descriptor,
    values: gl.shared_memory_descriptor,
    SHAPE: gl.constexpr,
) -> gl.tensor:
    """`mixed` [padded_dim, rows] with the weighted values of a tile added. `weight_rows` [rows, keys] is scratch."""
    weight_columns = weight_rows.permute([1, 0])
    weight_columns.store(weights.to(values.dtype))
    fence_async_shared()
    value_columns = values.reshape([SHAPE.keys, SHAPE.padded_dim]).permute([1, 0])
    mixed = warpgroup_mma(value_columns, weight_columns, mixed, is_async=True)
    return warpgroup_mma_wait(0, [mixed])


@gluon.jit
def _write(to: gl.tensor, mixed: gl.tensor, SHAPE: gl.constexpr) -> None:
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, mixed.type.layout))[None, :]
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(1, mixed.type.layout))[:, None]
    inside = (row < SHAPE.group) & (dim < SHAPE.head_dim)
    gl.store(to + row * SHAPE.head_dim + dim, mixed.to(to.dtype.element_ty), mask=inside)
