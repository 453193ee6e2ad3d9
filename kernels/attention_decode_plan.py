"""How the decodes of a step are dealt over a fixed grid of programs.

The keys that a decoding sequence sees are cut into tiles. The tiles of its first key/value head, those of the second
and so on, sequence after sequence, form one line, of which every program takes an equal, contiguous share (stream-K,
arXiv:2301.03598). So programs are busy for the same time whatever the lengths, and the grid may be captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import AttentionBatch

SHARE_FIELDS = tl.constexpr(16)
"""int32 words of a program's share: nine are used, the rest keeps shares in separate memory sectors."""


@dataclass(frozen=True)
class DecodePlan:
    """Shares of all programs, made on the device. All tensors are int32."""

    decodes: Tensor
    """[sequences + 1, 4]: key tiles, query token, row of the block tables and context of each decoding sequence, in
    order; the row after the last one is 0."""
    shares: Tensor
    """[programs, SHARE_FIELDS]: quotient and remainder of the division of the line by the programs, then where the
    share begins: row of `decodes`, key/value head, tile, and the four words of that row. 0 without a share."""
    arrivals: Tensor
    """[programs]: parts left so far of the head that the program's share is the first to cut; 0 between launches."""


def decode_plan(
    batch: AttentionBatch, *, kv_heads: int, sliding_window: int | None, keys: int, programs: int, fewest: int
) -> DecodePlan:
    """The plan of `batch`, made in its first layer and kept in `batch.plans`.

    A tile is `keys` keys, a share at least `fewest` tiles if there are so many. Nothing depends on the lengths
    themselves, so that a captured graph plans anew in every replay.
    """
    key = ("decode", kv_heads, sliding_window, keys, programs, fewest)
    if key not in batch.plans:
        batch.plans[key] = _make_plan(batch, kv_heads, sliding_window, keys, programs, fewest)
    plan: DecodePlan = batch.plans[key]
    return plan


def _make_plan(
    batch: AttentionBatch, kv_heads: int, sliding_window: int | None, keys: int, programs: int, fewest: int
) -> DecodePlan:
    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=batch.context_lens.device)

    plan = DecodePlan(words(batch.num_sequences + 1, 4), words(programs, SHARE_FIELDS.value), words(programs))
    sequences = triton.next_power_of_2(batch.num_sequences)
    _plan_kernel[(programs,)](
        batch.context_lens,
        batch.query_start,
        batch.table_rows,
        plan.decodes,
        plan.shares,
        plan.arrivals,
        batch.num_sequences,
        KV_HEADS=kv_heads,
        WINDOW=sliding_window or 0,
        KEYS=keys,
        FEWEST=fewest,
        SEQUENCES=sequences,
        num_warps=4 if sequences <= 1024 else 8,
    )
    return plan


@functools.cache
def part_space(device: torch.device, size: int) -> Tensor:
    """float32 [size]: unfinished results, two places a program. At one address, as captured graphs need it."""
    return torch.empty(size, dtype=torch.float32, device=device)


@triton.jit
def share_begin(program: tl.tensor, quotient: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """First tile of a program's share: the first `remainder` programs have one tile more than the others."""
    return quotient * program + tl.minimum(program, remainder)


@triton.jit
def share_owner(tile: tl.tensor, quotient: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """The program whose share holds a tile."""
    longer = remainder * (quotient + 1)
    later = remainder + (tile - longer) // tl.maximum(quotient, 1)
    return tl.where(tile < longer, tile // (quotient + 1), later)


# Specialised on, the number of sequences would compile the kernel again from step to step.
@triton.jit(do_not_specialize=["num_sequences"])
def _plan_kernel(
    context_lens: tl.tensor,
    query_start: tl.tensor,
    table_rows: tl.tensor,
    decodes: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    num_sequences: tl.tensor,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    FEWEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    """Every program looks at all sequences and finds its own share: one pass, no order among programs."""
    program = tl.program_id(0)
    sequence = tl.arange(0, SEQUENCES)
    inside = sequence < num_sequences
    token = tl.load(query_start + sequence, mask=inside, other=0)
    next_token = tl.load(query_start + sequence + 1, mask=inside, other=0)
    context = tl.load(context_lens + sequence, mask=inside, other=0)
    row = tl.load(table_rows + sequence, mask=inside, other=0)
    decoding = next_token - token == 1
    tiles = tl.cdiv(context, KEYS)
    if WINDOW > 0:
        tiles -= tl.maximum(context - WINDOW, 0) // KEYS
    tiles = tl.where(decoding, tiles, 0)
    index = tl.cumsum(decoding.to(tl.int32), 0) - 1
    end = tl.cumsum(tiles, 0) * KV_HEADS
    start = end - tiles * KV_HEADS

    total = tl.sum(tiles, 0) * KV_HEADS
    sharing = tl.maximum(tl.minimum(tl.num_programs(0), total // FEWEST), 1)
    has_share = program < sharing
    quotient = tl.where(has_share, total // sharing, 0)
    remainder = tl.where(has_share, total % sharing, 0)
    begin = share_begin(program, quotient, remainder)
    first = decoding & (start <= begin) & (begin < end)
    first_tiles = tl.sum(tl.where(first, tiles, 0), 0)
    offset = begin - tl.sum(tl.where(first, start, 0), 0)
    share = shares + program * SHARE_FIELDS
    tl.store(share, quotient)
    tl.store(share + 1, remainder)
    tl.store(share + 2, tl.sum(tl.where(first, index, 0), 0))
    tl.store(share + 3, offset // tl.maximum(first_tiles, 1))
    tl.store(share + 4, offset % tl.maximum(first_tiles, 1))
    tl.store(share + 5, first_tiles)
    tl.store(share + 6, tl.sum(tl.where(first, token, 0), 0))
    tl.store(share + 7, tl.sum(tl.where(first, row, 0), 0))
    tl.store(share + 8, tl.sum(tl.where(first, context, 0), 0))
    tl.store(arrivals + program, 0)

    if program == 0:
        entry = decodes + index * 4
        tl.store(entry, tiles, mask=decoding)
        tl.store(entry + 1, token, mask=decoding)
        tl.store(entry + 2, row, mask=decoding)
        tl.store(entry + 3, context, mask=decoding)
        after_last = decodes + tl.sum(decoding.to(tl.int32), 0) * 4
        tl.store(after_last + tl.arange(0, 4), tl.zeros((4,), tl.int32))
