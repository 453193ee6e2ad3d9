"""The warp group that gathers queries, and blocks of keys and values, into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.item import CONSUMERS, first_key_tile, load_item, num_turns, row_elements
from kernels.hopper.ring import announce, await_empty, load_async


@gluon.jit
def produce(
    queries: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    query: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    block_tables: gl.tensor,
    tiles: gl.tensor,
    num_items: gl.tensor,
    query_stride: gl.tensor,
    table_stride: gl.tensor,
    cache_strides: gl.tuple,
    SHAPE: gl.constexpr,
) -> None:
    """Fill the rings for one item after the other, as far ahead as the consumers allow.

    The last tile of keys comes first. The blocks of a tile are looked up while the copies of another start.
    """
    block_stride, slot_stride, head_stride = cache_strides
    n = 0
    for turn in range(num_turns(num_items)):
        head, table_row, query_begin, first_position, tokens = load_item(tiles, turn, num_items, SHAPE)
        table = block_tables + table_row.to(gl.int64) * table_stride
        key_base = key_cache + head.to(gl.int64) * head_stride
        value_base = value_cache + head.to(gl.int64) * head_stride
        last = first_position + tokens - 1
        first_tile = first_key_tile(first_position, SHAPE)
        last_tile = last // SHAPE.keys

        blocks = load_blocks(table, last_tile, last, SHAPE)
        fill(keys, n, key_base, blocks, last_tile, last, block_stride, slot_stride, SHAPE)
        fill_queries(queries, turn, query, head, query_begin, tokens, query_stride, SHAPE)
        for key_tile in range(last_tile, first_tile - 1, -1):
            next_blocks = load_blocks(table, gl.maximum(key_tile - 1, 0), last, SHAPE)
            fill(values, n, value_base, blocks, key_tile, last, block_stride, slot_stride, SHAPE)
            n += 1
            if key_tile > first_tile:
                fill(keys, n, key_base, next_blocks, key_tile - 1, last, block_stride, slot_stride, SHAPE)
            blocks = next_blocks


@gluon.constexpr_function
def _copy_layout(SHAPE: gl.constexpr) -> gl.BlockedLayout:
    """Layout of a tile of keys, [blocks, slots, padded_dim]: a thread copies 16 bytes at a time."""
    chunks = SHAPE.padded_dim // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // chunks, chunks], [1, 4, 1], [2, 1, 0])


@gluon.jit
def load_blocks(table: gl.tensor, key_tile: gl.tensor, last: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Ids of the blocks of a tile of keys, [blocks]; no entry after that of position `last` is read."""
    LAYOUT: gl.constexpr = _copy_layout(SHAPE)
    block = gl.arange(0, SHAPE.blocks, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    entry = gl.minimum(key_tile * SHAPE.keys // SHAPE.block_size + block, last // SHAPE.block_size)
    return gl.load(table + entry)


@gluon.jit
def fill(
    ring: gl.tuple,
    n: gl.tensor,
    base: gl.tensor,
    blocks: gl.tensor,
    key_tile: gl.tensor,
    last: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Start to copy a tile of keys or values. Slots after position `last`, which may hold NaN, become 0."""
    LAYOUT: gl.constexpr = _copy_layout(SHAPE)
    block = gl.arange(0, SHAPE.blocks, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    slot = gl.arange(0, SHAPE.slots, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    first = key_tile * SHAPE.keys
    inside = first + block * SHAPE.slots + slot <= last
    if SHAPE.head_dim < SHAPE.padded_dim:
        inside = inside & (dim < SHAPE.head_dim)
    block_base = base + (blocks.to(gl.int64) * block_stride)[:, None, None]
    element = (first % SHAPE.block_size + slot) * slot_stride + dim
    load_async(await_empty(ring, n), block_base + element, mask=inside)
    announce(ring, n)


@gluon.jit
def fill_queries(
    ring: gl.tuple,
    turn: gl.tensor,
    query: gl.tensor,
    head: gl.tensor,
    query_begin: gl.tensor,
    tokens: gl.tensor,
    query_stride: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Start to copy the query rows of each consumer into a buffer of its own. Rows of no token become 0."""
    CHUNKS: gl.constexpr = SHAPE.padded_dim // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // CHUNKS, CHUNKS], [4, 1], [1, 0])
    for consumer in gl.static_range(CONSUMERS):
        element, inside = row_elements(head, query_begin, tokens, query_stride, consumer, SHAPE, LAYOUT)
        n = turn * CONSUMERS + consumer
        load_async(await_empty(ring, n), query + element, mask=inside)
        announce(ring, n)
