"""What decodes know of their shared prefixes, added to what they found out about their own keys.

The pieces of a sequence's segments lie where `kernels.attention_prefix_line.piece_row` says. Loads of the first piece,
mostly the only one, start before the last tile of the sequence's own keys is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention_decode_plan import MERGES
from kernels.attention_line import share_begin, share_owner
from kernels.attention_prefix_line import piece_row


@gluon.jit
def load_merge(prefix: gl.tuple, index: gl.tensor) -> gl.tuple:
    """Row `index` of `DecodePlan.merges`: the four words of the outermost segment, and the key tiles of the next."""
    merge = prefix[0] + index * (MERGES * 4)
    return gl.load(merge), gl.load(merge + 1), gl.load(merge + 2), gl.load(merge + 3), gl.load(merge + 5)


@gluon.jit
def load_first_piece(
    prefix: gl.tuple,
    merge: gl.tuple,
    head: gl.tensor,
    wanted: gl.tensor,
    LAYOUT: gl.constexpr,
    PROGRAMS: gl.constexpr,
    TOKENS: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """The piece with which the outermost segment begins, as `_load_piece`; nothing seen where it is not `wanted`."""
    _, tiles, before, member, _ = merge
    at = piece_row(0, True, before, member, head, SHAPE.kv_heads, SHAPE.group, PROGRAMS, TOKENS)
    return _load_piece(prefix, at, wanted & (tiles > 0), LAYOUT, SHAPE)


@gluon.jit
def add_pieces(
    maximum: gl.tensor,
    total: gl.tensor,
    mixed: gl.tensor,
    first_piece: gl.tuple,
    prefix: gl.tuple,
    merge: gl.tuple,
    index: gl.tensor,
    head: gl.tensor,
    PROGRAMS: gl.constexpr,
    TOKENS: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """`maximum` and `total` [rows], `mixed` [padded_dim, rows] with all pieces of a sequence's segments.

    `first_piece` and `merge` are those of the sequence, `index` its row of `decodes`; PROGRAMS and TOKENS are those of
    the prefix plan.
    """
    LAYOUT: gl.constexpr = mixed.type.layout
    merges, shares, _, _ = prefix
    line, tiles, before, member, next_tiles = merge
    quotient = gl.load(shares)
    remainder = gl.load(shares + 1)
    maximum, total, mixed = _add_piece(maximum, total, mixed, first_piece)
    added = 1
    following = merges + index * (MERGES * 4) + 4
    while tiles > 0:
        start = line + head * tiles
        first = share_owner(start, quotient, remainder)
        last = first
        if share_begin(first + 1, quotient, remainder) < start + tiles:
            last = share_owner(start + tiles - 1, quotient, remainder)
        for program in range(first + added, last + 1, SHAPE.merged_pieces):
            # All loads are on their way together, so that many cuts cost few latencies.
            loaded: gl.tuple = ()
            for turn in gl.static_range(SHAPE.merged_pieces):
                at = piece_row(
                    program + turn, program + turn == first, before, member, head,
                    SHAPE.kv_heads, SHAPE.group, PROGRAMS, TOKENS,
                )  # fmt: skip
                loaded = loaded + (_load_piece(prefix, at, program + turn <= last, LAYOUT, SHAPE),)  # noqa: RUF005
            for turn in gl.static_range(SHAPE.merged_pieces):
                maximum, total, mixed = _add_piece(maximum, total, mixed, loaded[turn])
        added = 0
        tiles = next_tiles
        if tiles > 0:
            line = gl.load(following)
            before = gl.load(following + 2)
            member = gl.load(following + 3)
            next_tiles = gl.load(following + 5)
            following += 4
    return maximum, total, mixed


@gluon.jit
def _add_piece(
    maximum: gl.tensor, total: gl.tensor, mixed: gl.tensor, piece: gl.tuple
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    piece_maximum, piece_total, piece_mixed = piece
    new_maximum = gl.maximum(maximum, piece_maximum)
    decay = gl.exp2(maximum - new_maximum)
    weight = gl.exp2(piece_maximum - new_maximum)
    total = total * decay + piece_total * weight
    return new_maximum, total, mixed * decay[None, :] + piece_mixed * weight[None, :]


@gluon.jit
def _load_piece(
    prefix: gl.tuple, at: gl.tensor, exists: gl.tensor, LAYOUT: gl.constexpr, SHAPE: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Maximum and sum [rows] and mixed values [padded_dim, rows] of the piece whose first row is `at`.

    They pass the first-level cache, which does not see what other multiprocessors write. Nothing seen where the piece
    does not exist.
    """
    _, _, pieces, statistics = prefix
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, LAYOUT))
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    inside = (row < SHAPE.group) & exists
    of_rows = statistics + (at + row) * 2
    maximum = gl.load(of_rows, mask=inside, other=float("-inf"), cache_modifier=".cg")
    total = gl.load(of_rows + 1, mask=inside, other=0.0, cache_modifier=".cg")
    elements = pieces + ((at + row) * SHAPE.padded_dim)[None, :] + dim
    mixed = gl.load(elements, mask=inside[None, :] & (dim >= 0), other=0.0, cache_modifier=".cg")
    return maximum, total, mixed
