"""Shares of the decode plan under Triton's interpreter: every key tile is dealt exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batch import AttentionBatch
from tests.attention_cases import make_batch
from tests.interpreted import interpreted

attention_decode_plan = interpreted("kernels.attention_decode_plan")

KEYS = 16
Tile = tuple[int, int, int]
"""Query token, key/value head, tile."""


def plan_of(
    batch: AttentionBatch, kv_heads: int, window: int | None, programs: int, fewest: int = 2
) -> attention_decode_plan.DecodePlan:
    return attention_decode_plan.decode_plan(
        batch,
        kv_heads=kv_heads,
        block_size=16,
        sliding_window=window,
        keys=KEYS,
        programs=programs,
        fewest=fewest,
    )


def walk(plan: attention_decode_plan.DecodePlan, kv_heads: int) -> list[list[Tile]]:
    """The tiles of each program's share, as the kernel walks them."""
    shares = []
    for program, words in enumerate(plan.shares.tolist()):
        quotient, remainder, index, head, tile, *entry = words[:9]
        share = []
        for _ in range(quotient + (program < remainder)):
            share.append((entry[1], head, tile))
            tile += 1
            if tile == entry[0]:
                tile, head = 0, head + 1
            if head == kv_heads:
                head, index = 0, index + 1
                entry = plan.decodes[index].tolist()
        shares.append(share)
    return shares


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=20),
    kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 100),
    programs=st.integers(1, 40),
)
def test_every_tile_of_a_decode_is_dealt_once_and_no_other(
    lengths: list[tuple[int, int]], kv_heads: int, window: int | None, programs: int
) -> None:
    query_lens = [queries for queries, _ in lengths]
    context_lens = [queries + more if queries else 0 for queries, more in lengths]
    batch = make_batch(torch.zeros(len(lengths), 1, dtype=torch.int32), query_lens, context_lens)
    shares = walk(plan_of(batch, kv_heads, window, programs), kv_heads)

    expected = []
    for sequence, token in enumerate(batch.query_start.tolist()[:-1]):
        if query_lens[sequence] == 1:
            context = context_lens[sequence]
            first = max(context - window, 0) // KEYS if window else 0
            tiles = -(-context // KEYS) - first
            expected += [(token, head, tile) for head in range(kv_heads) for tile in range(tiles)]
    assert [tile for share in shares for tile in share] == expected
    sizes = [len(share) for share in shares if share]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("fewest", "expected"), [(1, [1, 1, 1, 1, 1]), (2, [3, 2]), (4, [5]), (9, [5])])
def test_a_share_has_the_fewest_tiles_allowed_or_all(fewest: int, expected: list[int]) -> None:
    batch = make_batch(torch.zeros(1, 1, dtype=torch.int32), [1], [5 * KEYS])
    sizes = [len(share) for share in walk(plan_of(batch, 1, None, 8, fewest), 1)]
    assert sizes == expected + [0] * (8 - len(expected))


def test_layers_share_a_plan_and_another_window_has_its_own() -> None:
    batch = make_batch(torch.zeros(2, 1, dtype=torch.int32), [1, 1], [50, 70])
    plan = plan_of(batch, 2, None, 4)
    assert plan_of(batch, 2, None, 4) is plan
    assert plan_of(batch, 2, 30, 4) is not plan
