"""Places on the line of key tiles that `kernels.attention_decode_plan` deals out.

A place is a tuple: position on the line, row of `decodes`, key/value head and tile, then the row's words (key tiles,
query token, element of the block tables where its keys begin, number of keys).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_place(decodes: gl.tensor, place: gl.tuple, SHAPE: gl.constexpr) -> gl.tuple:
    """The place after `place`; after the last one that of a row of zeros."""
    position, index, head, tile, tiles, token, table_begin, context = place
    position += 1
    tile += 1
    if tile == tiles:
        tile = tile * 0
        head += 1
        if head == SHAPE.kv_heads:
            head = head * 0
            index += 1
            entry = decodes + index * 4
            tiles = gl.load(entry)
            token = gl.load(entry + 1)
            table_begin = gl.load(entry + 2)
            context = gl.load(entry + 3)
    return position, index, head, tile, tiles, token, table_begin, context


@gluon.jit
def first_key(place: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Position in its sequence of the first key of the tile at `place`, a multiple of SHAPE.keys."""
    _, _, _, tile, _, _, _, context = place
    first_tile = tile * 0
    if SHAPE.window > 0:
        first_tile = gl.maximum(context - SHAPE.window, 0) // SHAPE.keys
    return (first_tile + tile) * SHAPE.keys


@gluon.jit
def is_visible(key: gl.tensor, place: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    """Which keys, counted from the first of the tile at `place`, the query sees; no others are read."""
    _, _, _, _, _, _, _, context = place
    first = first_key(place, SHAPE)
    visible = key < context - first
    if SHAPE.window > 0:
        visible = visible & (key >= context - SHAPE.window - first)
    return visible
