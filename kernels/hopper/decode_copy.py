"""Copies of tiles of keys and values, with their queries, into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.decode_line import first_key, is_visible
from kernels.hopper.ring import load_async


@gluon.constexpr_function
def _copy_layout(SHAPE: gl.constexpr) -> gl.BlockedLayout:
    """Layout of a tile, [blocks, slots, padded_dim]: a thread copies 16 bytes at a time."""
    chunks = SHAPE.padded_dim // 8
    warps = min(SHAPE.blocks, 4)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // chunks, chunks], [warps, 4 // warps, 1], [2, 1, 0])


@gluon.jit
def load_blocks(block_tables: gl.tensor, place: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Ids of the blocks of the tile at `place`, [blocks]; no entry after that of the sequence's last key is read."""
    LAYOUT: gl.constexpr = _copy_layout(SHAPE)
    _, _, _, _, _, _, table_begin, context = place
    block = gl.arange(0, SHAPE.blocks, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    entry = first_key(place, SHAPE) // SHAPE.block_size + block
    return gl.load(block_tables + table_begin + gl.minimum(entry, gl.maximum(context - 1, 0) // SHAPE.block_size))


@gluon.jit
def start_copies(
    buffers: gl.tuple,
    stage: gl.tensor,
    tensors: gl.tuple,
    strides: gl.tuple,
    place: gl.tuple,
    blocks: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Start to copy the tile at `place` into a stage of the buffers. Keys and values that nobody sees become 0."""
    keys, values, queries = buffers
    query, key_cache, value_cache = tensors
    query_stride, block_stride, slot_stride, head_stride = strides
    _, _, head, _, _, token, _, _ = place
    LAYOUT: gl.constexpr = _copy_layout(SHAPE)
    block = gl.arange(0, SHAPE.blocks, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    slot = gl.arange(0, SHAPE.slots, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    inside = is_visible(block * SHAPE.slots + slot, place, SHAPE)
    if SHAPE.head_dim < SHAPE.padded_dim:
        inside = inside & (dim < SHAPE.head_dim)
    base = blocks.to(gl.int64) * block_stride + head * head_stride
    element = base[:, None, None] + ((first_key(place, SHAPE) % SHAPE.block_size + slot) * slot_stride + dim)
    load_async(keys.index(stage), key_cache + element, mask=inside)
    load_async(values.index(stage), value_cache + element, mask=inside)

    CHUNKS: gl.constexpr = SHAPE.padded_dim // 8
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // CHUNKS, CHUNKS], [4, 1], [1, 0])
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, ROWS))[:, None]
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(0, ROWS))[None, :]
    rows = query + token.to(gl.int64) * query_stride + head * (SHAPE.group * SHAPE.head_dim)
    load_async(
        queries.index(stage),
        rows + (row * SHAPE.head_dim + dim),
        mask=(row < SHAPE.group) & (dim < SHAPE.head_dim),
    )
