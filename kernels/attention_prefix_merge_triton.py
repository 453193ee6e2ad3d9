"""What decodes know of their shared prefixes, added to what they found out about their own keys, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_decode_plan import MERGES
from kernels.attention_line import share_owner
from kernels.attention_prefix_line import piece_row


@triton.jit
def add_prefix(
    maximum: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    merges: tl.tensor,
    shares: tl.tensor,
    pieces: tl.tensor,
    statistics: tl.tensor,
    index: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`maximum` [ROWS], `total` [ROWS] and `mixed` [ROWS, PADDED_DIM] with all pieces of a sequence's segments.

    `index` is the sequence's row of `decodes`; PROGRAMS and TOKENS are those of the prefix plan.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    inside = row < GROUP
    quotient = tl.load(shares)
    remainder = tl.load(shares + 1)
    merge = merges + index * (MERGES * 4)
    tiles = tl.load(merge + 1)
    while tiles > 0:
        start = tl.load(merge) + head * tiles
        before = tl.load(merge + 2)
        member = tl.load(merge + 3)
        first = share_owner(start, quotient, remainder)
        last = share_owner(start + tiles - 1, quotient, remainder)
        for program in range(first, last + 1):
            at = piece_row(program, program == first, before, member, head, KV_HEADS, GROUP, PROGRAMS, TOKENS) + row
            # Spare rows keep a finite maximum, as -inf - -inf would be NaN.
            piece_maximum = tl.load(statistics + at * 2, mask=inside, other=float("-inf"))
            piece_total = tl.load(statistics + at * 2 + 1, mask=inside, other=0.0)
            piece = tl.load(pieces + at[:, None] * PADDED_DIM + dim[None, :], mask=inside[:, None], other=0.0)
            new_maximum = tl.maximum(maximum, piece_maximum)
            decay = tl.exp2(maximum - new_maximum)
            weight = tl.exp2(piece_maximum - new_maximum)
            total = total * decay + piece_total * weight
            mixed = mixed * decay[:, None] + piece * weight[:, None]
            maximum = new_maximum
        merge += 4
        tiles = tl.load(merge + 1)
    return maximum, total, mixed
