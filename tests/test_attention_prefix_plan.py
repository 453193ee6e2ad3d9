"""Shares of the prefix plan under Triton's interpreter: every key tile of every item is dealt exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batch import AttentionBatch
from tests.attention_cases import Segment, make_batch, make_prefixes
from tests.interpreted import interpreted

attention_prefix_plan = interpreted("kernels.attention_prefix_plan")
attention_decode_plan = interpreted("kernels.attention_decode_plan")

KEYS = 32
BLOCK = 16
TOKENS = 3
Tile = tuple[int, int, int, int]
"""First sequence and first key of the segment, tile of sequences, key/value head; a key tile is told by its order."""


def batch_of(segments: list[Segment], sequences: int) -> AttentionBatch:
    batch = make_batch(torch.zeros(sequences, 1, dtype=torch.int32), [1] * sequences, [1000] * sequences)
    return replace(batch, prefixes=make_prefixes(segments, batch))


def plan_of(batch: AttentionBatch, kv_heads: int, programs: int, fewest: int = 1) -> attention_prefix_plan.PrefixPlan:
    return attention_prefix_plan.prefix_plan(
        batch, kv_heads=kv_heads, keys=KEYS, tokens=TOKENS, programs=programs, fewest=fewest
    )


def walk(plan: attention_prefix_plan.PrefixPlan, kv_heads: int) -> list[list[tuple[Tile, int]]]:
    """Items and key tiles of each program's share, as the kernels walk them."""
    shares = []
    for program, words in enumerate(plan.shares.tolist()):
        quotient, remainder, index, sequence_tile, head, tile = words[:6]
        record = plan.records[index].tolist()
        share = []
        for _ in range(quotient + (program < remainder)):
            share.append(((record[2], record[4], sequence_tile, head), tile))
            tile += 1
            if tile == record[0]:
                tile, head = 0, head + 1
            if head == kv_heads:
                head, sequence_tile = 0, sequence_tile + 1
            if sequence_tile * TOKENS >= record[3]:
                sequence_tile, index = 0, index + 1
                record = plan.records[index].tolist()
        shares.append(share)
    return shares


@st.composite
def segment_lists(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Groups one behind the other, each with a segment and perhaps one inside; and the number of sequences."""
    segments, sequences = [], 0
    for _ in range(draw(st.integers(0, 4))):
        first = sequences + draw(st.integers(0, 2))
        count = draw(st.integers(2, 8))
        end = BLOCK * draw(st.integers(1, 9))
        segments.append((first, count, 0, end))
        if draw(st.booleans()):
            inner = draw(st.integers(2, count))
            segments.append((first + count - inner, inner, end, end + BLOCK * draw(st.integers(1, 5))))
        sequences = first + count
    return segments, sequences + 1


@settings(max_examples=60, deadline=None)
@given(shape=segment_lists(), kv_heads=st.integers(1, 3), programs=st.integers(1, 40))
def test_every_tile_of_an_item_is_dealt_once_and_decodes_know_where(
    shape: tuple[list[Segment], int], kv_heads: int, programs: int
) -> None:
    segments, sequences = shape
    batch = batch_of(segments, sequences)
    plan = plan_of(batch, kv_heads, programs)
    dealt = [tile for share in walk(plan, kv_heads) for tile in share]
    expected = [
        ((first, first_key, sequence_tile, head), tile)
        for first, count, first_key, end_key in segments
        for sequence_tile in range(-(-count // TOKENS))
        for head in range(kv_heads)
        for tile in range(-(-(end_key - first_key) // KEYS))
    ]
    assert dealt == expected

    decodes = attention_decode_plan.decode_plan(
        batch, kv_heads=kv_heads, block_size=BLOCK, sliding_window=None, keys=KEYS, programs=4, fewest=1, prefix=plan
    )
    kept = set()
    for sequence, merges in enumerate(decodes.merges[:-1].tolist()):
        own = [segment for segment in segments if segment[0] <= sequence < segment[0] + segment[1]]
        assert [merge[1] for merge in merges] == [
            *(-(-(end_key - first_key) // KEYS) for _, _, first_key, end_key in own),
            *[0] * (len(merges) - len(own)),
        ]
        for (first, _, first_key, _), (line, _, before, member) in zip(own, merges, strict=False):
            assert dealt[line] == ((first, first_key, (sequence - first) // TOKENS, 0), 0)
            assert member == (sequence - first) % TOKENS
            kept.add(before)
    assert sorted(kept) == [*range(sum(count for _, count, _, _ in segments))]


@pytest.mark.parametrize(("fewest", "expected"), [(1, [1, 1, 1, 1, 1]), (2, [3, 2]), (9, [5])])
def test_a_share_has_the_fewest_tiles_allowed_or_all(fewest: int, expected: list[int]) -> None:
    plan = plan_of(batch_of([(0, 2, 0, 5 * KEYS)], 2), 1, 8, fewest)
    assert [len(share) for share in walk(plan, 1)] == expected + [0] * (8 - len(expected))


def test_layers_share_a_plan_and_there_is_none_without_prefixes() -> None:
    batch = batch_of([(0, 2, 0, 64)], 2)
    assert plan_of(batch, 2, 4) is plan_of(batch, 2, 4)
    assert plan_of(replace(batch, prefixes=None), 2, 4) is None


def test_decodes_are_planned_over_the_keys_behind_their_prefixes() -> None:
    batch = replace(batch_of([(0, 2, 0, 96)], 3), context_lens=torch.tensor([100, 130, 64], dtype=torch.int32))
    batch = replace(batch, block_tables=torch.zeros(3, 10, dtype=torch.int32))
    plan = attention_decode_plan.decode_plan(
        batch, kv_heads=1, block_size=BLOCK, sliding_window=None, keys=KEYS, programs=2, fewest=1,
        prefix=plan_of(batch, 1, 4),
    )  # fmt: skip
    assert plan.decodes.tolist() == [[1, 0, 6, 4], [2, 1, 16, 34], [2, 2, 20, 64], [0, 0, 0, 0]]
