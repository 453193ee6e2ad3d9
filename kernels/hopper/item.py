"""An item of work: the tile of query tokens of one record of `PrefillTiles`, of one key/value head.

The query heads of the key/value head are packed with the tokens into rows (row = token * group + head). Each of
the two consumers attends with `tokens` of an item's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSUMERS = gl.constexpr(2)
_ROWS = 64
"""Query rows of a consumer: one product of a warp group has as many."""


@dataclass(frozen=True)
class ItemShape:
    """Sizes that the compiler knows. Each is a `constexpr`, as Gluon wants them in the shape of a tensor."""

    kv_heads: gl.constexpr
    group: gl.constexpr
    """Query heads of a key/value head."""
    head_dim: gl.constexpr
    padded_dim: gl.constexpr
    block_size: gl.constexpr
    window: gl.constexpr
    """0: none."""
    rows: gl.constexpr
    """Query rows of a consumer."""
    tokens: gl.constexpr
    """Query tokens of a consumer."""
    keys: gl.constexpr
    """Keys of a tile of keys."""
    blocks: gl.constexpr
    """Blocks that a tile of keys touches."""
    slots: gl.constexpr
    """Slots that a tile of keys has in each of them."""


def tokens_per_item(group: int) -> int:
    """Query tokens of both consumers together, where `group` query heads share a key/value head."""
    return CONSUMERS.value * (_ROWS // group)


def item_shape(kv_heads: int, group: int, head_dim: int, block_size: int, window: int) -> ItemShape:
    """The shape for a model's heads, the cache's blocks, and a sliding window (0: none)."""
    padded_dim = triton.next_power_of_2(head_dim)
    # Two tiles each of keys and values fit into shared memory, the scores of one into a consumer's registers.
    keys = 128 if padded_dim <= 128 else 64
    return ItemShape(
        kv_heads=gl.constexpr(kv_heads),
        group=gl.constexpr(group),
        head_dim=gl.constexpr(head_dim),
        padded_dim=gl.constexpr(padded_dim),
        block_size=gl.constexpr(block_size),
        window=gl.constexpr(window),
        rows=gl.constexpr(_ROWS),
        tokens=gl.constexpr(_ROWS // group),
        keys=gl.constexpr(keys),
        blocks=gl.constexpr(max(keys // block_size, 1)),
        slots=gl.constexpr(min(keys, block_size)),
    )


@gluon.jit
def num_turns(num_items: gl.tensor) -> gl.tensor:
    """How many items this program takes."""
    turns = num_items // gl.num_programs(0)
    return turns + (_item_of_turn(turns) < num_items).to(gl.int32)


@gluon.jit
def _item_of_turn(turn: gl.tensor) -> gl.tensor:
    """The longest items come first. They are dealt back and forth, so that all programs get as much to do."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def load_item(
    tiles: gl.tensor, turn: gl.tensor, num_items: gl.tensor, SHAPE: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Key/value head, row of the block tables, first query token, its position, number of query tokens.

    After this program's last turn: those of some item.
    """
    item = gl.minimum(_item_of_turn(turn), num_items - 1)
    record = tiles + item // SHAPE.kv_heads * 4
    head = item % SHAPE.kv_heads
    return head, gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)


@gluon.jit
def first_key_tile(first_position: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """The first tile of keys that an item sees whose first token is at `first_position`."""
    start = first_position * 0
    if SHAPE.window > 0:
        start = gl.maximum(first_position - SHAPE.window + 1, 0) // SHAPE.keys
    return start


@gluon.jit
def row_elements(
    head: gl.tensor,
    query_begin: gl.tensor,
    tokens: gl.tensor,
    token_stride: gl.tensor,
    consumer: gl.constexpr,
    SHAPE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Offsets [rows, padded_dim] of a consumer's rows in the query or the output, and which of them exist."""
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    token = consumer * SHAPE.tokens + row // SHAPE.group
    inside = ((row < SHAPE.tokens * SHAPE.group) & (token < tokens))[:, None]
    if SHAPE.head_dim < SHAPE.padded_dim:
        inside = inside & (dim < SHAPE.head_dim)
    offset = (query_begin + token).to(gl.int64) * token_stride
    return (offset + (head * SHAPE.group + row % SHAPE.group) * SHAPE.head_dim)[:, None] + dim, inside
