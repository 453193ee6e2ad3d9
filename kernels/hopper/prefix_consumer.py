"""The warp groups that attend to shared keys, and leave pieces for the decodes to merge."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention_line import SHARE_FIELDS, share_begin
from kernels.attention_prefix_line import first_place, piece_row, place_after
from kernels.hopper.consumer import attend, scores_layout, skip
from kernels.hopper.item import CONSUMERS


@gluon.jit
def consume_prefixes(
    queries: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    pieces: gl.tensor,
    statistics: gl.tensor,
    line: gl.tuple,
    scale: gl.tensor,
    DTYPE: gl.constexpr,
    consumer: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """Attend with one consumer's share of the rows of every item."""
    TOKENS: gl.constexpr = CONSUMERS * SHAPE.tokens
    records, shares = line
    program = gl.program_id(0)
    share = shares + program * SHARE_FIELDS
    quotient = gl.load(share)
    remainder = gl.load(share + 1)
    begin = share_begin(program, quotient, remainder)
    end = share_begin(program + 1, quotient, remainder)
    place = first_place(records, share)
    position = begin
    rows_n = begin * 0 + consumer
    while position < end:
        _, sequence_tile, _, tile, tiles, _, _, sequences, first_key, end_key, _ = place
        steps = gl.minimum(tiles - tile, end - position)
        if sequence_tile * TOKENS + consumer * SHAPE.tokens < sequences:
            last_tile = tiles - 1 - tile
            last = end_key - first_key - 1
            seen = gl.full([SHAPE.rows], 0, gl.int32, layout=gl.SliceLayout(1, scores_layout(SHAPE))) + last
            bounds = (last_tile + 1 - steps, last_tile + 1 - steps, last_tile, last_tile)
            mixed, maximum, total = attend(
                queries, rows_n, keys, values, position - begin, seen, bounds, scale, DTYPE, SHAPE
            )
            _leave_piece(pieces, statistics, place, mixed, maximum, total, consumer, SHAPE)
        else:
            skip(queries, rows_n, keys, values, position - begin, steps)
        position += steps
        rows_n += CONSUMERS
        place = place_after(records, place, steps, SHAPE.kv_heads, TOKENS)


@gluon.jit
def _leave_piece(
    pieces: gl.tensor,
    statistics: gl.tensor,
    place: gl.tuple,
    mixed: gl.tensor,
    maximum: gl.tensor,
    total: gl.tensor,
    consumer: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """Write what the piece that begins at `place` has found out."""
    ROWS: gl.constexpr = gl.SliceLayout(1, mixed.type.layout)
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(0, mixed.type.layout))[None, :]
    at, inside = _piece_rows(place, consumer, SHAPE, ROWS)
    elements = pieces + (at * SHAPE.padded_dim)[:, None] + dim
    gl.store(elements, mixed, mask=inside[:, None] & (dim >= 0))
    STATISTICS: gl.constexpr = maximum.type.layout
    at, inside = _piece_rows(place, consumer, SHAPE, STATISTICS)
    gl.store(statistics + at * 2, maximum, mask=inside)
    gl.store(statistics + at * 2 + 1, total, mask=inside)


@gluon.jit
def _piece_rows(
    place: gl.tuple, consumer: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """The row of `PrefixPieces` of each of a consumer's rows, and which of them exist."""
    TOKENS: gl.constexpr = CONSUMERS * SHAPE.tokens
    _, sequence_tile, head, tile, _, _, _, sequences, _, _, before = place
    row = gl.arange(0, SHAPE.rows, layout=LAYOUT)
    member = consumer * SHAPE.tokens + row // SHAPE.group
    sequence = sequence_tile * TOKENS + member
    at = piece_row(
        gl.program_id(0), tile == 0, before + sequence, member, head,
        SHAPE.kv_heads, SHAPE.group, gl.num_programs(0), TOKENS,
    )  # fmt: skip
    inside = (row < SHAPE.tokens * SHAPE.group) & (sequence < sequences)
    return at + row % SHAPE.group, inside
