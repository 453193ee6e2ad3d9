"""Paged attention of sequences with one query token: on a Hopper GPU the kernel made for it, elsewhere plain Triton.

The query heads that share a key/value head are the rows of a tile, which walks the keys with an online softmax
(FlashAttention-2, arXiv:2307.08691). `kernels.attention_decode_plan` says which program walks which keys.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper
from kernels.attention_batch import AttentionBatch
from kernels.attention_decode_parts_triton import arrive, leave_part
from kernels.attention_decode_plan import decode_plan, part_space
from kernels.attention_decode_tiles import DecodeTile, decode_tile
from kernels.attention_line import SHARE_FIELDS, share_begin
from kernels.attention_prefix_merge_triton import add_prefix
from kernels.attention_prefix_triton import attend_to_prefixes, plan_prefixes

_FEWEST_TILES = 2
"""Of a share: with fewer, merging takes longer than reading (13.1 against 16.7 us for 2,048 keys on an H200)."""
_MERGED_ROWS = 32
"""Rows of partial results that are merged at a time: 32 x 128 values are 64 registers of each thread."""
_INTERPRETED_MULTIPROCESSORS = 2
"""Stands for a GPU's where there is none, under Triton's interpreter."""


def decode_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Fill `output` for every sequence with exactly one query token; the rows of all others keep what they hold.

    Grid and scalar arguments depend on shapes alone, so a captured graph may be replayed with other lengths.
    Launches share their workspace: they must follow one another, as on one stream.

    Args:
        output: [tokens, heads, head_dim] in the dtype of `query`, heads and head_dim contiguous.
        query: as `output`.
        key_cache: [num_blocks, block_size, kv_heads, head_dim], head_dim contiguous.
        value_cache: as `key_cache`, with the same strides.
        batch: the layout; the rows of its block tables are contiguous.
        scale: positive factor of the scores before the softmax.
        sliding_window: at least 1, or None for all keys.
    """
    if hopper.serves(query):
        from kernels.hopper.decode import decode_attention_hopper  # Gluon cannot be imported where it cannot run.

        decode_attention_hopper(
            output, query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window
        )
        return
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    group = query.shape[1] // kv_heads
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    tile = decode_tile(key_cache.dtype, padded_dim)
    programs = _programs(query.device, tile, padded_dim * key_cache.element_size())
    prefix = None if sliding_window else plan_prefixes(query, key_cache, batch)
    plan = decode_plan(
        batch,
        kv_heads=kv_heads,
        block_size=block_size,
        sliding_window=sliding_window,
        keys=tile.keys,
        programs=programs,
        fewest=_FEWEST_TILES,
        prefix=prefix,
    )
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
        part_space(query.device, programs * 2 * group * (padded_dim + 2)),
        plan.merges,
        prefix.shares if prefix else None,
        pieces.mixed if pieces else None,
        pieces.statistics if pieces else None,
        scale * math.log2(math.e),
        output.stride(0),
        query.stride(0),
        *key_cache.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED_GROUP=padded_group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        KEYS=tile.keys,
        STAGES=tile.stages,
        MERGED_PARTS=_MERGED_ROWS // padded_group,
        PREFIX_PROGRAMS=prefix.programs if prefix else 0,
        PREFIX_TOKENS=prefix.tokens if prefix else 0,
        num_warps=tile.warps,
    )


@functools.cache
def _programs(device: torch.device, tile: DecodeTile, row_bytes: int) -> int:
    """As many programs as the GPU holds at a time."""
    if device.type == "cpu":
        return _INTERPRETED_MULTIPROCESSORS * tile.programs
    properties = torch.cuda.get_device_properties(device)
    # Keys and values of a tile in each stage but one, and as much again for what else a program holds there.
    program_bytes = 2 * (tile.stages - 1) * tile.keys * row_bytes * 3 // 2
    resident = max(1, properties.shared_memory_per_multiprocessor // program_bytes)
    return int(properties.multi_processor_count * min(tile.programs, resident))


@triton.jit
def _decode_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    decodes: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    parts: tl.tensor,
    merges: tl.tensor,
    prefix_shares: tl.tensor,
    prefix_mixed: tl.tensor,
    prefix_statistics: tl.tensor,
    scale: tl.tensor,
    output_stride: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    PREFIX_PROGRAMS: tl.constexpr,
    PREFIX_TOKENS: tl.constexpr,
) -> None:
    """One program walks its share of the line. `scale` includes log2(e); WINDOW 0 is none.

    The tiles of one sequence and key/value head are a segment. One that lies within the share is written out. Of a
    cut one, every program leaves its part, and the last to arrive merges the parts, in their order along the line.
    A share cuts at most two: the segment in which it begins (place 0) and the one in which it ends (place 1).
    The part with the end of a segment takes in what is known of the prefixes of its sequence.
    """
    ROWS: tl.constexpr = 16  # The fewest of a tensor core product.
    program = tl.program_id(0)
    share = shares + program * SHARE_FIELDS
    quotient = tl.load(share)
    remainder = tl.load(share + 1)
    index = tl.load(share + 2)
    head = tl.load(share + 3)
    tile = tl.load(share + 4)
    tiles = tl.load(share + 5)
    token = tl.load(share + 6)
    table_begin = tl.load(share + 7)
    context = tl.load(share + 8)
    begin = share_begin(program, quotient, remainder)
    end = share_begin(program + 1, quotient, remainder)
    if begin == end:
        return
    first_segment = begin - tile
    first_tiles = tiles
    first_head = head
    first_token = token

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    query_inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query_element = row[:, None] * HEAD_DIM + dim[None, :]
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    at = _first_key(context, WINDOW, KEYS) + tile * KEYS
    table = block_tables + table_begin
    blocks = _load_blocks(table, at, context, BLOCK_SIZE, WINDOW, KEYS)
    # One loop over all segments keeps loads in flight from one segment to the next. The blocks of the next tile are
    # loaded a turn ahead, or the pipeline would spend one of its stages on them.
    for position in tl.range(begin, end, num_stages=STAGES):
        queries = tl.load(
            query + token.to(tl.int64) * query_stride + head * (GROUP * HEAD_DIM) + query_element,
            mask=query_inside,
            other=0.0,
        )
        key_rows, value_rows, visible = _load_tile(
            key_cache, value_cache, blocks, head * head_stride, at, context,
            block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, KEYS,
        )  # fmt: skip
        segment = position - tile
        segment_head = head
        segment_token = token
        segment_index = index
        ends = tile + 1 == tiles
        tile = tl.where(ends, 0, tile + 1)
        head += ends.to(tl.int32)
        if head == KV_HEADS:
            head = 0
            index += 1
            entry = decodes + index * 4
            tiles = tl.load(entry)
            token = tl.load(entry + 1)
            table_begin = tl.load(entry + 2)
            context = tl.load(entry + 3)
        at = _first_key(context, WINDOW, KEYS) + tile * KEYS
        table = block_tables + table_begin
        blocks = _load_blocks(table, at, context, BLOCK_SIZE, WINDOW, KEYS)

        maximum, total, mixed = _attend(maximum, total, mixed, queries, key_rows, value_rows, visible, scale)
        if PREFIX_PROGRAMS > 0 and ends:
            maximum, total, mixed = add_prefix(
                maximum, total, mixed, merges, prefix_shares, prefix_mixed, prefix_statistics, segment_index,
                segment_head, KV_HEADS, GROUP, PADDED_DIM, ROWS, PREFIX_PROGRAMS, PREFIX_TOKENS,
            )  # fmt: skip
        if ends & (segment >= begin):
            result = (mixed / total[:, None]).to(output.dtype.element_ty)
            to = output + segment_token.to(tl.int64) * output_stride + segment_head * (GROUP * HEAD_DIM)
            tl.store(to + query_element, result, mask=query_inside)
        elif ends | (position + 1 == end):
            place = 2 * program + (segment >= begin).to(tl.int32)
            leave_part(parts, place, maximum, total, mixed, GROUP, PADDED_DIM, ROWS)
        maximum = tl.where(ends, float("-inf"), maximum)
        total = tl.where(ends, 0.0, total)
        mixed = tl.where(ends, 0.0, mixed)

    last_segment = end - tile
    cuts_first = first_segment < begin
    cuts_last = (tile > 0) & (last_segment >= begin)
    if cuts_first | cuts_last:
        tl.debug_barrier()  # An arrival releases the stores of all threads.
    if cuts_first:
        arrive(
            output, arrivals, parts, first_segment, first_tiles, first_token, first_head, quotient, remainder,
            output_stride, GROUP, PADDED_GROUP, HEAD_DIM, PADDED_DIM, MERGED_PARTS,
        )  # fmt: skip
    if cuts_last:
        arrive(
            output, arrivals, parts, last_segment, tiles, token, head, quotient, remainder,
            output_stride, GROUP, PADDED_GROUP, HEAD_DIM, PADDED_DIM, MERGED_PARTS,
        )  # fmt: skip


@triton.jit
def _first_key(context: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    """Where the first tile starts that holds a visible key: a multiple of KEYS."""
    return tl.maximum(context - WINDOW, 0) // KEYS * KEYS if WINDOW > 0 else 0


@triton.jit
def _visible(at: tl.tensor, context: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    """Which keys of the tile at `at` the query sees; no others are read."""
    key = at + tl.arange(0, KEYS)
    visible = key < context
    if WINDOW > 0:
        visible &= key >= context - WINDOW
    return visible


@triton.jit
def _load_blocks(
    table: tl.tensor,
    at: tl.tensor,
    context: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """The block of each key of a tile, [KEYS]; 0 for keys that are not visible, whose entries may hold anything.

    As KEYS and BLOCK_SIZE are powers of two and `at` is a multiple of KEYS, a tile holds whole blocks or lies in one:
    what belongs to a key is the sum of a scalar and a constant.
    """
    entry = at // BLOCK_SIZE + tl.arange(0, KEYS) // BLOCK_SIZE
    return tl.load(table + entry, mask=_visible(at, context, WINDOW, KEYS), other=0)


@triton.jit
def _load_tile(
    keys: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    head_offset: tl.tensor,
    at: tl.tensor,
    context: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys [PADDED_DIM, KEYS], values [KEYS, PADDED_DIM], visibility [KEYS] of a tile, with 0 for what is not read."""
    dim = tl.arange(0, PADDED_DIM)
    visible = _visible(at, context, WINDOW, KEYS)
    offset = at % BLOCK_SIZE + tl.arange(0, KEYS) % BLOCK_SIZE
    slot = blocks.to(tl.int64) * block_stride + (offset * slot_stride + head_offset)
    element = slot[:, None] + dim[None, :]
    inside = visible[:, None]
    if HEAD_DIM < PADDED_DIM:
        inside &= (dim < HEAD_DIM)[None, :]
    key_rows = tl.load(keys + element, mask=inside, other=0.0)
    value_rows = tl.load(values + element, mask=inside, other=0.0)
    return tl.trans(key_rows), value_rows, visible


@triton.jit
def _attend(
    maximum: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    queries: tl.tensor,
    key_columns: tl.tensor,
    value_rows: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take a tile, of which at least one key is visible, into the running maximum, sum and mixed values."""
    # Float32 products would be TF32 by default.
    scores = tl.dot(queries, key_columns, input_precision="ieee")
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value_rows.dtype), value_rows, mixed * decay[:, None], input_precision="ieee")
    return new_maximum, total, mixed
