"""The tiles of a step's prefill chunks. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_batch import AttentionBatch
from tests import attention_cases
from tests.interpreted import interpreted

prefill_tiles = interpreted("kernels.attention_prefill_plan").prefill_tiles


def make_batch(query_lens: list[int], context_lens: list[int]) -> AttentionBatch:
    """The last sequence has the first row of the block tables, and so on."""
    sequences = len(query_lens)
    tables = torch.zeros(sequences, 1, dtype=torch.int32)
    return attention_cases.make_batch(tables, query_lens, context_lens, [*range(sequences)][::-1])


def planned(batch: AttentionBatch, num_tokens: int, tokens_per_tile: int) -> list[list[int]]:
    tiles = prefill_tiles(batch, num_tokens, tokens_per_tile)
    assert int(tiles.count) <= tiles.capacity
    return tiles.records[: int(tiles.count)].tolist()


def test_tiles_are_cut_from_the_end_and_come_in_the_order_of_the_keys_they_see() -> None:
    batch = make_batch([10, 1, 3, 4], [10, 50, 40, 8])
    assert planned(batch, 18, 4) == [
        [1, 11, 37, 3],
        [3, 6, 6, 4],
        [0, 14, 4, 4],
        [3, 2, 2, 4],
        [3, 0, 0, 2],
    ]


@pytest.mark.parametrize(("sequences", "tokens_per_tile"), [(1, 5), (40, 16), (300, 32)])
def test_every_token_of_a_chunk_lies_in_one_tile(sequences: int, tokens_per_tile: int) -> None:
    generator = torch.Generator().manual_seed(sequences)
    query_lens = torch.randint(0, 150, (sequences,), generator=generator)
    query_lens[torch.rand(sequences, generator=generator) < 0.3] = 1
    query_lens[0] = 149
    context_lens = query_lens + torch.randint(0, 300, (sequences,), generator=generator)
    batch = make_batch(query_lens.tolist(), context_lens.tolist())
    times = torch.zeros(int(query_lens.sum()), dtype=torch.int64)
    seen = []
    for row, begin, position, tokens in planned(batch, len(times), tokens_per_tile):
        times[begin : begin + tokens] += 1
        sequence = sequences - 1 - row
        assert position == context_lens[sequence] - query_lens[sequence] + begin - batch.query_start[sequence]
        seen.append(position + tokens)
    assert torch.equal(times, (query_lens > 1).long().repeat_interleave(query_lens))
    assert seen == sorted(seen, reverse=True)


def test_padding_and_decodes_get_no_tiles() -> None:
    assert planned(make_batch([1, 1, 0, 0], [7, 9, 0, 0]), 20, 8) == []


def test_the_capacity_is_enough_for_the_worst_lengths() -> None:
    assert len(planned(make_batch([2] * 9, [2] * 9), 18, 8)) == 9
    assert len(planned(make_batch([17, 1], [17, 1]), 18, 8)) == 3
    assert len(planned(make_batch([9, 9], [9, 9]), 18, 8)) == 4


def test_the_tiles_are_made_once_a_step() -> None:
    batch = make_batch([10, 3], [10, 40])
    tiles = prefill_tiles(batch, 13, 4)
    assert prefill_tiles(batch, 13, 4) is tiles
    assert prefill_tiles(batch, 13, 8) is not tiles
