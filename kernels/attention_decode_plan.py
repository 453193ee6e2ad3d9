"""How the decodes of a step are dealt over a fixed grid of programs.

The keys that a decoding sequence sees are cut into tiles. The tiles of its first key/value head, those of the second
and so on, sequence after sequence, form one line (`kernels.attention_line`). Keys that a sequence shares with others
(`SharedPrefixes`) are not on it: the plan says where a launch before has left what it found out about them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import PREFIX_LEVELS, AttentionBatch
from kernels.attention_line import SHARE_FIELDS, deal_line, share_begin
from kernels.attention_prefix_plan import PrefixPlan

MERGES = tl.constexpr(PREFIX_LEVELS + 1)
"""Rows of `DecodePlan.merges` for a sequence: one for each level, and the end."""


@dataclass(frozen=True)
class DecodePlan:
    """Shares of all programs, made on the device. All tensors are int32."""

    decodes: Tensor
    """[sequences + 1, 4]: key tiles, query token, element of the block tables where its keys begin, and number of keys
    of each decoding sequence, in order; the row after the last one is 0. Keys of shared prefixes do not count."""
    shares: Tensor
    """[programs, SHARE_FIELDS]: quotient and remainder of the division of the line by the programs, then where the
    share begins: row of `decodes`, key/value head, tile, and the four words of that row. 0 without a share."""
    arrivals: Tensor
    """[programs]: parts left so far of the head that the program's share is the first to cut; 0 between launches."""
    merges: Tensor | None
    """[sequences + 1, MERGES, 4], by row of `decodes`: for each segment of the sequence in turn, where its item of
    key/value head 0 begins on the line of the prefixes, the item's key tiles, the number of sequences before this one
    in the order of all segments, and in the item. The row after the last has 0 tiles. None without prefixes."""


def decode_plan(
    batch: AttentionBatch,
    *,
    kv_heads: int,
    block_size: int,
    sliding_window: int | None,
    keys: int,
    programs: int,
    fewest: int,
    prefix: PrefixPlan | None = None,
) -> DecodePlan:
    """The plan of `batch`, made in its first layer and kept in `batch.plans`.

    A tile is `keys` keys, a share at least `fewest` tiles if there are so many. With a `prefix`, the keys of
    `batch.prefixes` are left to it. Nothing depends on the lengths themselves, so that a captured graph plans anew in
    every replay.
    """
    key = ("decode", kv_heads, block_size, sliding_window, keys, programs, fewest, prefix)
    if key not in batch.plans:
        batch.plans[key] = _make_plan(batch, kv_heads, block_size, sliding_window, keys, programs, fewest, prefix)
    plan: DecodePlan = batch.plans[key]
    return plan


def _make_plan(
    batch: AttentionBatch,
    kv_heads: int,
    block_size: int,
    sliding_window: int | None,
    keys: int,
    programs: int,
    fewest: int,
    prefix: PrefixPlan | None,
) -> DecodePlan:
    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=batch.context_lens.device)

    shared = None if prefix is None else batch.prefixes
    plan = DecodePlan(
        words(batch.num_sequences + 1, 4),
        words(programs, SHARE_FIELDS.value),
        words(programs),
        words(batch.num_sequences + 1, MERGES.value, 4) if shared else None,
    )
    sequences = triton.next_power_of_2(batch.num_sequences)
    _plan_kernel[(programs,)](
        batch.context_lens,
        batch.query_start,
        batch.table_rows,
        shared.own_start if shared else None,
        shared.own_segments if shared else None,
        prefix.lines if prefix else None,
        plan.decodes,
        plan.shares,
        plan.arrivals,
        plan.merges,
        batch.num_sequences,
        batch.block_tables.stride(0),
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        KEYS=keys,
        FEWEST=fewest,
        TOKENS=prefix.tokens if prefix else 1,
        SEQUENCES=sequences,
        MERGES_EACH=triton.next_power_of_2(triton.cdiv(sequences * MERGES.value, programs)),
        num_warps=4 if sequences <= 1024 else 8,
    )
    return plan


@functools.cache
def part_space(device: torch.device, size: int) -> Tensor:
    """float32 [size]: unfinished results, two places a program. At one address, as captured graphs need it."""
    return torch.empty(size, dtype=torch.float32, device=device)


# What changes from step to step would compile the kernel again if it were specialised on.
@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _plan_kernel(
    context_lens: tl.tensor,
    query_start: tl.tensor,
    table_rows: tl.tensor,
    own_start: tl.tensor,
    own_segments: tl.tensor,
    lines: tl.tensor,
    decodes: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    merges: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    FEWEST: tl.constexpr,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    MERGES_EACH: tl.constexpr,
) -> None:
    """Every program looks at all sequences and finds its own share: one pass, no order among programs."""
    program = tl.program_id(0)
    sequence = tl.arange(0, SEQUENCES)
    inside = sequence < num_sequences
    token = tl.load(query_start + sequence, mask=inside, other=0)
    next_token = tl.load(query_start + sequence + 1, mask=inside, other=0)
    own = tl.load(context_lens + sequence, mask=inside, other=0)
    table = tl.load(table_rows + sequence, mask=inside, other=0) * table_stride
    if merges is not None:
        skipped = tl.load(own_start + sequence, mask=inside, other=0)
        own -= skipped
        table += skipped // BLOCK_SIZE
    decoding = next_token - token == 1
    tiles = tl.cdiv(own, KEYS)
    if WINDOW > 0:
        tiles -= tl.maximum(own - WINDOW, 0) // KEYS
    tiles = tl.where(decoding, tiles, 0)
    index = tl.cumsum(decoding.to(tl.int32), 0) - 1
    end = tl.cumsum(tiles, 0) * KV_HEADS
    start = end - tiles * KV_HEADS

    quotient, remainder = deal_line(tl.sum(tiles, 0) * KV_HEADS, FEWEST)
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
    tl.store(share + 7, tl.sum(tl.where(first, table, 0), 0))
    tl.store(share + 8, tl.sum(tl.where(first, own, 0), 0))
    tl.store(arrivals + program, 0)

    if program == 0:
        entry = decodes + index * 4
        tl.store(entry, tiles, mask=decoding)
        tl.store(entry + 1, token, mask=decoding)
        tl.store(entry + 2, table, mask=decoding)
        tl.store(entry + 3, own, mask=decoding)
        after_last = decodes + tl.sum(decoding.to(tl.int32), 0) * 4
        tl.store(after_last + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    if merges is not None:
        _find_merges(own_segments, lines, merges, num_sequences, KV_HEADS, TOKENS, MERGES_EACH)


@triton.jit
def _find_merges(
    own_segments: tl.tensor,
    lines: tl.tensor,
    merges: tl.tensor,
    num_sequences: tl.tensor,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGES_EACH: tl.constexpr,
) -> None:
    """Write MERGES_EACH rows of `merges`, of consecutive sequences.

    Those of sequence `s` are those of row `s` of `decodes`: sequences with segments come first. Where a sequence that
    does not decode has been left out of `decodes`, both are zeros.
    """
    LEVELS: tl.constexpr = MERGES - 1
    row = tl.program_id(0) * MERGES_EACH + tl.arange(0, MERGES_EACH)
    sequence = row // MERGES
    level = row % MERGES
    inside = sequence < num_sequences
    segment = tl.load(own_segments + sequence * LEVELS + level, mask=inside & (level < LEVELS), other=-1)
    line = lines + segment * 4
    start = tl.load(line, mask=segment >= 0, other=0)
    tiles = tl.load(line + 1, mask=segment >= 0, other=0)
    member = sequence - tl.load(line + 2, mask=segment >= 0, other=0)
    before = tl.load(line + 3, mask=segment >= 0, other=0) + member
    tl.store(merges + row * 4, start + member // TOKENS * KV_HEADS * tiles, mask=inside)
    tl.store(merges + row * 4 + 1, tiles, mask=inside)
    tl.store(merges + row * 4 + 2, before, mask=inside)
    tl.store(merges + row * 4 + 3, member % TOKENS, mask=inside)
