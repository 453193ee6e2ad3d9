"""A line of equal pieces of work, of which every program takes an equal, contiguous share (stream-K, arXiv:2301.03598).

So programs are busy for the same time whatever the lengths, and the grid may be captured.
"""

from __future__ import annotations

import triton
import triton.language as tl

SHARE_FIELDS = tl.constexpr(16)
"""int32 words of a program's share: at most nine are used, the rest keeps shares in separate memory sectors."""


@triton.jit
def deal_line(length: tl.tensor, FEWEST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Quotient and remainder of the division of a line over the programs; 0 for a program without a share.

    A share is at least FEWEST long if the line is.
    """
    sharing = tl.maximum(tl.minimum(tl.num_programs(0), length // FEWEST), 1)
    has_share = tl.program_id(0) < sharing
    return tl.where(has_share, length // sharing, 0), tl.where(has_share, length % sharing, 0)


@triton.jit
def share_begin(program: tl.tensor, quotient: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """Where a program's share begins: the first `remainder` programs have one more than the others."""
    return quotient * program + tl.minimum(program, remainder)


@triton.jit
def share_owner(position: tl.tensor, quotient: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """The program whose share holds a position of the line."""
    longer = remainder * (quotient + 1)
    later = remainder + (position - longer) // tl.maximum(quotient, 1)
    return tl.where(position < longer, position // (quotient + 1), later)
