"""Shares of a line under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreted import interpreted

attention_line = interpreted("kernels.attention_line")
deal_line, share_begin, share_owner = attention_line.deal_line, attention_line.share_begin, attention_line.share_owner


@triton.jit
def _deal(begins: tl.tensor, owners: tl.tensor, length: tl.tensor, FEWEST: tl.constexpr) -> None:
    program = tl.program_id(0)
    quotient, remainder = deal_line(length, FEWEST)
    tl.store(begins + 2 * program, share_begin(program, quotient, remainder))
    tl.store(begins + 2 * program + 1, share_begin(program + 1, quotient, remainder))
    if program == 0:
        for position in range(0, length):
            tl.store(owners + position, share_owner(position, quotient, remainder))


def test_shares_are_equal_and_every_position_has_the_owner_whose_share_holds_it() -> None:
    programs = 7
    for length in (0, 1, 2, 6, 7, 8, 40):
        for fewest in (1, 2, 5):
            begins = torch.empty(programs, 2, dtype=torch.int32)
            owners = torch.empty(length, dtype=torch.int32)
            _deal[(programs,)](begins, owners, length, FEWEST=fewest)
            shares = [range(begin, end) for begin, end in begins.tolist() if end > begin]
            assert [position for share in shares for position in share] == [*range(length)]
            assert [next(i for i, share in enumerate(shares) if p in share) for p in range(length)] == owners.tolist()
            sizes = [len(share) for share in shares]
            assert not sizes or (max(sizes) - min(sizes) <= 1 and min(sizes) >= min(fewest, length))
