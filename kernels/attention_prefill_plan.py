"""Which tile of queries each program of a prefill kernel takes, decided on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import AttentionBatch

_SEQUENCES = 256
"""Sequences that a program of the plan kernel compares its tiles with at a time."""

_MAX_TILES = 32
"""Most tiles of a program: compared with _SEQUENCES at a time, they take 64 registers of each thread of four warps."""


@dataclass(frozen=True, eq=False)
class PrefillTiles:
    """Tiles of consecutive query tokens, those that see the most keys first."""

    records: Tensor
    """int32 [capacity, 4]: row of the block tables, first query token, its position, number of query tokens."""
    count: Tensor
    """int32 [1]: so many of `records` are tiles, the rest is not written."""

    @property
    def capacity(self) -> int:
        return self.records.shape[0]


def prefill_tiles(batch: AttentionBatch, num_tokens: int, tokens_per_tile: int) -> PrefillTiles:
    """The tiles of all sequences with more than one query token, of at most `num_tokens` query tokens in all.

    Made once a step, kept in `batch.plans`. Nothing depends on the lengths themselves, so that a captured
    graph makes the tiles anew in every replay.
    """
    key = ("prefill tiles", tokens_per_tile)
    if key not in batch.plans:
        batch.plans[key] = _plan(batch, num_tokens, tokens_per_tile)
    return batch.plans[key]


def _plan(batch: AttentionBatch, num_tokens: int, tokens_per_tile: int) -> PrefillTiles:
    # Every sequence fills its tiles but one, and has two tokens or more.
    prefills = min(batch.num_sequences, num_tokens // 2)
    capacity = prefills + (num_tokens - prefills) // tokens_per_tile
    device = batch.context_lens.device
    tiles = PrefillTiles(
        records=torch.empty((capacity, 4), dtype=torch.int32, device=device),
        count=torch.empty(1, dtype=torch.int32, device=device),
    )
    tiles_per_program = min(_MAX_TILES, triton.next_power_of_2(triton.cdiv(batch.max_query_len, tokens_per_tile)))
    grid = (batch.num_sequences, triton.cdiv(batch.max_query_len, tokens_per_tile * tiles_per_program))
    _plan_kernel[grid](
        tiles.records,
        tiles.count,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        batch.num_sequences,
        TOKENS=tokens_per_tile,
        TILES=tiles_per_program,
        SEQUENCES=_SEQUENCES,
        num_warps=4,
    )
    return tiles


@triton.jit(do_not_specialize=["num_sequences"])
def _plan_kernel(
    records: tl.tensor,
    count: tl.tensor,
    table_rows: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    num_sequences: tl.tensor,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    """One program writes TILES records of one sequence to their places in the order of all tiles.

    Tiles are cut from a sequence's last token backwards, so that the one that is not full sees the fewest
    keys. Tile `k` from the end sees about `context_len - k * TOKENS` keys: of every sequence, the tiles that
    see more are counted by a division.
    """
    sequence = tl.program_id(0)
    first = tl.program_id(1) * TILES
    query_begin = tl.load(query_start + sequence)
    query_len = _prefill_len(query_begin, tl.load(query_start + sequence + 1))
    counts = (sequence == 0) & (first == 0)
    if (first * TOKENS >= query_len) & (not counts):
        return

    context_len = tl.load(context_lens + sequence)
    tile = first + tl.arange(0, TILES)
    keys = context_len - tile * TOKENS
    rank = tl.zeros((TILES,), tl.int32)
    total = tl.zeros((SEQUENCES,), tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        other = start + tl.arange(0, SEQUENCES)
        exists = other < num_sequences
        other_begin = tl.load(query_start + other, mask=exists, other=0)
        other_end = tl.load(query_start + other + 1, mask=exists, other=0)
        other_tiles = tl.cdiv(_prefill_len(other_begin, other_end), TOKENS)
        # Ties go to the earlier sequence.
        other_keys = tl.load(context_lens + other, mask=exists, other=0) + (other < sequence)
        ahead = tl.cdiv(other_keys[None, :] - keys[:, None], TOKENS)
        rank += tl.sum(tl.minimum(tl.maximum(ahead, 0), other_tiles[None, :]), 1)
        total += other_tiles
    if counts:
        tl.store(count, tl.sum(total))

    end = query_len - tile * TOKENS
    begin = tl.maximum(end - TOKENS, 0)
    record = records + rank * 4
    tl.store(record, tl.load(table_rows + sequence), mask=end > 0)
    tl.store(record + 1, query_begin + begin, mask=end > 0)
    tl.store(record + 2, context_len - query_len + begin, mask=end > 0)
    tl.store(record + 3, end - begin, mask=end > 0)


@triton.jit
def _prefill_len(begin: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Query tokens of a sequence, 0 if the prefill kernels leave it to others."""
    return tl.where(end - begin > 1, end - begin, 0)
