"""How the keys that decodes share are dealt over a fixed grid of programs, and where the results of a share lie.

An item is a segment of `SharedPrefixes`, a tile of up to `tokens` consecutive sequences of it, and one key/value head.
Its keys are cut into tiles. The tiles of all items form one line, of which every program takes an equal, contiguous
share, as in `kernels.attention_decode_plan`. The line runs through a segment's key/value heads before its next tile of
sequences, and through an item's keys from the last to the first.

What a program has found out about one item is a piece: mixed values, maximum and sum of each query row, in float32. The
piece with which an item begins has rows of its own, the pieces of the programs that go on with it lie in rows of those
programs. So no rows are kept for cuts that do not happen, and whoever needs an item finds its pieces by divisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import PREFIX_LEVELS, AttentionBatch
from kernels.attention_line import SHARE_FIELDS, deal_line, share_begin

RECORD_FIELDS = tl.constexpr(8)
"""int32 words of a segment's record: seven are used."""


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """Shares of all programs, made on the device. All tensors are int32."""

    tokens: int
    """Most sequences of an item."""
    records: Tensor
    """[capacity + 1, RECORD_FIELDS]: key tiles, row of the block tables, first sequence, number of sequences, first
    key, key after the last, and the number of sequences of all segments before; the row after the last one is 0."""
    shares: Tensor
    """[programs, SHARE_FIELDS]: quotient and remainder of the division of the line by the programs, then where the
    share begins: row of `records`, tile of sequences, key/value head, key tile. 0 without a share."""
    lines: Tensor
    """[capacity, 4], by row of `SharedPrefixes.segments`: where the segment begins on the line, key tiles, first
    sequence, and the number of sequences of all segments before."""

    @property
    def programs(self) -> int:
        return self.shares.shape[0]


@dataclass(frozen=True, eq=False)
class PrefixPieces:
    """Results of a launch, in rows that `kernels.attention_prefix_line.piece_row` finds."""

    mixed: Tensor
    """float32 [rows, padded_dim]: values weighted by 2 to the power of their score less `statistics[:, 0]`."""
    statistics: Tensor
    """float32 [rows, 2]: the largest score, in powers of 2, and the sum of the weights."""


def prefix_plan(
    batch: AttentionBatch, *, kv_heads: int, keys: int, tokens: int, programs: int, fewest: int
) -> PrefixPlan | None:
    """The plan of `batch.prefixes`, if there are any, made in its first layer and kept in `batch.plans`.

    A tile is `keys` keys, an item has up to `tokens` sequences, a share at least `fewest` tiles if there are so many.
    Nothing depends on the values of the tensors, so that a captured graph plans anew in every replay.
    """
    if batch.prefixes is None:
        return None
    key = ("prefix", kv_heads, keys, tokens, programs, fewest)
    if key not in batch.plans:
        batch.plans[key] = _make_plan(batch.prefixes.segments, kv_heads, keys, tokens, programs, fewest)
    plan: PrefixPlan = batch.plans[key]
    return plan


def _make_plan(segments: Tensor, kv_heads: int, keys: int, tokens: int, programs: int, fewest: int) -> PrefixPlan:
    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=segments.device)

    capacity = segments.shape[0]
    plan = PrefixPlan(
        tokens,
        words(capacity + 1, RECORD_FIELDS.value),
        words(programs, SHARE_FIELDS.value),
        words(capacity, 4),
    )
    padded = triton.next_power_of_2(capacity)
    _plan_kernel[(programs,)](
        segments,
        plan.records,
        plan.shares,
        plan.lines,
        capacity,
        KV_HEADS=kv_heads,
        KEYS=keys,
        TOKENS=tokens,
        FEWEST=fewest,
        SEGMENTS=padded,
        num_warps=4 if padded <= 1024 else 8,
    )
    return plan


def prefix_pieces(
    batch: AttentionBatch, plan: PrefixPlan, *, heads: int, kv_heads: int, padded_dim: int
) -> PrefixPieces:
    """Room for the results of a launch."""
    rows = plan.programs * plan.tokens * (heads // kv_heads) + PREFIX_LEVELS * batch.num_sequences * heads

    def room(columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.float32, device=plan.shares.device)

    return PrefixPieces(room(padded_dim), room(2))


# Specialised on, the number of segments would compile the kernel again from step to step.
@triton.jit(do_not_specialize=["capacity"])
def _plan_kernel(
    segments: tl.tensor,
    records: tl.tensor,
    shares: tl.tensor,
    lines: tl.tensor,
    capacity: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEWEST: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """Every program looks at all segments and finds its own share: one pass, no order among programs."""
    program = tl.program_id(0)
    segment = tl.arange(0, SEGMENTS)
    inside = segment < capacity
    table_row = tl.load(segments + segment * 5, mask=inside, other=0)
    first_sequence = tl.load(segments + segment * 5 + 1, mask=inside, other=0)
    members = tl.load(segments + segment * 5 + 2, mask=inside, other=0)
    first_key = tl.load(segments + segment * 5 + 3, mask=inside, other=0)
    end_key = tl.load(segments + segment * 5 + 4, mask=inside, other=0)
    tiles = tl.where(members > 0, tl.cdiv(end_key - first_key, KEYS), 0)
    length = tl.cdiv(members, TOKENS) * KV_HEADS * tiles
    end = tl.cumsum(length, 0)
    start = end - length
    used = (length > 0).to(tl.int32)
    index = tl.cumsum(used, 0) - used
    members_before = tl.cumsum(members, 0) - members

    quotient, remainder = deal_line(tl.sum(length, 0), FEWEST)
    begin = share_begin(program, quotient, remainder)
    first = (start <= begin) & (begin < end)
    first_tiles = tl.maximum(tl.sum(tl.where(first, tiles, 0), 0), 1)
    offset = begin - tl.sum(tl.where(first, start, 0), 0)
    item = offset // first_tiles
    share = shares + program * SHARE_FIELDS
    tl.store(share, quotient)
    tl.store(share + 1, remainder)
    tl.store(share + 2, tl.sum(tl.where(first, index, 0), 0))
    tl.store(share + 3, item // KV_HEADS)
    tl.store(share + 4, item % KV_HEADS)
    tl.store(share + 5, offset % first_tiles)

    if program == 0:
        line = lines + segment * 4
        tl.store(line, start, mask=inside)
        tl.store(line + 1, tiles, mask=inside)
        tl.store(line + 2, first_sequence, mask=inside)
        tl.store(line + 3, members_before, mask=inside)
        record = records + index * RECORD_FIELDS
        tl.store(record, tiles, mask=length > 0)
        tl.store(record + 1, table_row, mask=length > 0)
        tl.store(record + 2, first_sequence, mask=length > 0)
        tl.store(record + 3, members, mask=length > 0)
        tl.store(record + 4, first_key, mask=length > 0)
        tl.store(record + 5, end_key, mask=length > 0)
        tl.store(record + 6, members_before, mask=length > 0)
        after_last = records + tl.sum(used, 0) * RECORD_FIELDS
        tl.store(after_last + tl.arange(0, RECORD_FIELDS), tl.zeros((RECORD_FIELDS,), tl.int32))
