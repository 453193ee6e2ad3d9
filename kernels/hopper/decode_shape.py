"""Sizes of the Hopper decode kernel that its compiler knows."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.experimental.gluon import language as gl

_TILE_ELEMENTS = 64 * 128
"""Keys of a tile: 16 KiB, and as much for its values. Fewer than 64 keys would not fill a product."""
_FEWEST_KEYS = 64
_FEWEST_ROWS = 8
"""A product of a warp group has at least 8 columns; here they are query rows."""
_MERGED_ELEMENTS = 4096
"""Elements of partial results that are merged at a time: with their statistics, 96 registers of each of 128 threads."""
_MOST_MERGED_PARTS = 8
_PIECE_ELEMENTS = 4096
"""Elements of prefix pieces that are loaded at a time, rows of no query among them: 32 registers of each thread."""


@dataclass(frozen=True)
class DecodeShape:
    """Each size is a `constexpr`, as Gluon wants them in the shape of a tensor."""

    kv_heads: gl.constexpr
    group: gl.constexpr
    """Query heads of a key/value head."""
    padded_group: gl.constexpr
    rows: gl.constexpr
    """Query rows of a product: `padded_group`, or more."""
    head_dim: gl.constexpr
    padded_dim: gl.constexpr
    block_size: gl.constexpr
    window: gl.constexpr
    """0: none."""
    keys: gl.constexpr
    """Keys of a tile."""
    blocks: gl.constexpr
    """Blocks that a tile touches."""
    slots: gl.constexpr
    """Slots that a tile has in each of them."""
    merged_parts: gl.constexpr
    """Parts that are merged at a time."""
    merged_pieces: gl.constexpr
    """Pieces of shared prefixes that are merged at a time."""


def decode_shape(kv_heads: int, group: int, head_dim: int, block_size: int, window: int) -> DecodeShape:
    """The shape for a model's heads, the cache's blocks, and a sliding window (0: none)."""
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    rows = max(padded_group, _FEWEST_ROWS)
    keys = max(_TILE_ELEMENTS // padded_dim, _FEWEST_KEYS)
    return DecodeShape(
        kv_heads=gl.constexpr(kv_heads),
        group=gl.constexpr(group),
        padded_group=gl.constexpr(padded_group),
        rows=gl.constexpr(rows),
        head_dim=gl.constexpr(head_dim),
        padded_dim=gl.constexpr(padded_dim),
        block_size=gl.constexpr(block_size),
        window=gl.constexpr(window),
        keys=gl.constexpr(keys),
        blocks=gl.constexpr(max(keys // block_size, 1)),
        slots=gl.constexpr(min(keys, block_size)),
        merged_parts=gl.constexpr(min(_MOST_MERGED_PARTS, _MERGED_ELEMENTS // (padded_group * padded_dim))),
        merged_pieces=gl.constexpr(max(_PIECE_ELEMENTS // (rows * padded_dim), 1)),
    )
