"""The warp group that gathers queries, and blocks of shared keys and values, into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention_line import SHARE_FIELDS, share_begin
from kernels.attention_prefix_line import first_place, place_after
from kernels.hopper.item import CONSUMERS
from kernels.hopper.producer import fill, fill_queries, load_blocks


@gluon.jit
def produce_prefixes(
    queries: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    query: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    block_tables: gl.tensor,
    line: gl.tuple,
    query_stride: gl.tensor,
    table_stride: gl.tensor,
    cache_strides: gl.tuple,
    SHAPE: gl.constexpr,
) -> None:
    """Fill the rings for one key tile of the share after the other, as far ahead as the consumers allow.

    The blocks of a tile are looked up while the copies of the one before start.
    """
    TOKENS: gl.constexpr = CONSUMERS * SHAPE.tokens
    records, shares = line
    block_stride, slot_stride, head_stride = cache_strides
    program = gl.program_id(0)
    share = shares + program * SHARE_FIELDS
    quotient = gl.load(share)
    remainder = gl.load(share + 1)
    begin = share_begin(program, quotient, remainder)
    end = share_begin(program + 1, quotient, remainder)
    place = first_place(records, share)
    blocks = _blocks_at(block_tables, table_stride, place, SHAPE)
    item = begin * 0
    for position in range(begin, end):
        _, sequence_tile, head, tile, tiles, _, first_sequence, sequences, first_key, end_key, _ = place
        following = place_after(records, place, 1, SHAPE.kv_heads, TOKENS)
        next_blocks = _blocks_at(block_tables, table_stride, following, SHAPE)
        n = position - begin
        key_tile = tiles - 1 - tile
        last = end_key - first_key - 1
        offset = head.to(gl.int64) * head_stride
        fill(keys, n, key_cache + offset, blocks, key_tile, last, block_stride, slot_stride, SHAPE)
        if (n == 0) | (tile == 0):
            first = first_sequence + sequence_tile * TOKENS
            tokens = gl.minimum(sequences - sequence_tile * TOKENS, TOKENS)
            fill_queries(queries, item, query, head, first, tokens, query_stride, SHAPE)
            item += 1
        fill(values, n, value_cache + offset, blocks, key_tile, last, block_stride, slot_stride, SHAPE)
        place = following
        blocks = next_blocks


@gluon.jit
def _blocks_at(block_tables: gl.tensor, table_stride: gl.tensor, place: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Ids of the blocks of the key tile at `place`."""
    _, _, _, tile, tiles, table_row, _, _, first_key, end_key, _ = place
    table = block_tables + table_row.to(gl.int64) * table_stride + first_key // SHAPE.block_size
    key_tile = gl.maximum(tiles - 1 - tile, 0)
    return load_blocks(table, key_tile, gl.maximum(end_key - first_key - 1, 0), SHAPE)
