"""A step's arrays, checked against the sequences they come from."""

from __future__ import annotations

import numpy as np

from engine.batch import build_batch
from engine.noise_keys import row_key
from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable, Slots, unread


def table_with(*sequences: tuple[int, list[int], list[int], int, Sampling]) -> SequenceTable:
    """A table of (row id, tokens, blocks, computed, sampling)."""
    table = SequenceTable(4, block_size=4, end_token_ids=(0,))
    for row_id, tokens, blocks, computed, sampling in sequences:
        request = Request(row_id, np.array(tokens, np.int32), sampling)
        table.admit(Sequence(request), np.array(blocks, np.int32), computed, 30)
    return table


def append(table: SequenceTable, slots: Slots, token: int) -> None:
    """Append a token that is drawn and read."""
    table.append_unread(slots)
    table.read(slots, table.num_tokens[slots] - 1, np.full(len(slots), token, np.int32))


def test_a_mixed_batch_lays_out_tokens_positions_and_slots() -> None:
    table = table_with(
        (7, [10, 11, 12, 13, 14], [9, 2], 4, Sampling(temperature=0.5, seed=3)),
        (8, [20, 21, 22, 23, 24, 25, 26], [5, 6], 1, Sampling()),
    )
    batch = build_batch(table, table.running, np.array([1, 5]))
    assert batch.token_ids.tolist() == [14, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [4, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [8, 21, 22, 23, 24, 25]
    assert batch.query_start.tolist() == [0, 1, 6]
    assert batch.context_lens.tolist() == [5, 6]
    assert batch.slots.tolist() == table.running.tolist()
    assert batch.block_changes.T.tolist() == [
        [slot, place, block]
        for slot, blocks in zip(table.running.tolist(), ([9, 2], [5, 6]), strict=True)
        for place, block in enumerate(blocks)
    ]
    assert batch.num_decodes == 1
    assert batch.sampled_tokens.tolist() == [0]  # the second sequence has a token left to compute
    assert batch.sampled_slots.tolist() == table.running[:1].tolist()
    assert batch.sampling.row_key.tolist() == [row_key(3, 7, 0)]
    assert batch.sampling.position.tolist() == [5]
    assert batch.sampling.temperature.tolist() == [0.5]


def test_a_token_that_is_not_read_yet_stands_in_the_batch_as_its_slot() -> None:
    table = table_with((0, [1, 2], [0], 2, Sampling()), (1, [3], [1], 1, Sampling()))
    slots = table.running
    table.append_unread(slots)
    assert build_batch(table, slots, np.array([1, 1])).token_ids.tolist() == unread(slots).tolist()
    table.read(slots, np.array([2, 1]), np.array([7, 8], np.int32))
    assert build_batch(table, slots, np.array([1, 1])).token_ids.tolist() == [7, 8]
    assert (unread(slots) < 0).all()


def test_only_what_changed_in_the_block_tables_is_sent() -> None:
    table = table_with((0, [1, 2, 3, 4], [5], 4, Sampling()), (1, [3], [1], 1, Sampling()))
    slots = table.running
    table.append_unread(slots)
    assert build_batch(table, slots, np.array([1, 1])).block_changes.shape == (3, 2)
    table.append_block(slots[:1], np.array([6], np.int32))
    assert build_batch(table, slots, np.array([1, 1])).block_changes.tolist() == [[slots[0]], [1], [6]]
    assert build_batch(table, slots, np.array([1, 1])).block_changes.shape == (3, 0)


def test_slot_numbers_beyond_32_bits_stay_exact() -> None:
    # trap 19
    block = 2**31 - 1
    table = table_with((0, [1, 2, 3, 4, 5, 6], [0, block], 5, Sampling()))
    batch = build_batch(table, table.running, np.array([1]))
    assert batch.slot_mapping.tolist() == [block * 4 + 1]


def test_end_and_stop_tokens_are_held_back_below_min_tokens() -> None:
    # trap 30
    held = Sampling(min_tokens=2, stop_token_ids=(5, 6))
    table = table_with(
        (0, [1, 2], [0], 1, Sampling(stop_token_ids=(9,))),
        (1, [1, 2], [1], 1, held),
        (2, [1, 2], [2], 1, Sampling(min_tokens=1, ignore_eos=True)),
    )
    batch = build_batch(table, table.running, np.array([1, 1, 1]))
    assert batch.sampling.suppressed.tolist() == [[1, 5], [1, 6], [1, 0]]
    append(table, table.running, 3)
    append(table, table.running, 3)
    table.num_computed[table.running] += 2
    assert build_batch(table, table.running, np.array([1, 1, 1])).sampling.suppressed.tolist() == []
