"""The table of running sequences: what a slot holds from admission to removal."""

from __future__ import annotations

import numpy as np
import pytest

from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable

BLOCK_SIZE = 4


def admit(
    table: SequenceTable, tokens: list[int], blocks: list[int], sampling: Sampling | None = None, limit: int = 30
) -> int:
    """Run a sequence of which nothing is computed; its slot."""
    request = Request(0, np.array(tokens, np.int32), sampling or Sampling())
    return table.admit(Sequence(request), np.array(blocks, np.int32), 0, limit)


def append(table: SequenceTable, slot: int, token: int) -> None:
    """Append a token that is drawn and read."""
    slots = np.array([slot])
    table.append_unread(slots)
    table.read(slots, table.num_tokens[slots] - 1, np.array([token], np.int32))


def test_a_longer_sequence_widens_the_table_and_keeps_the_others() -> None:
    table = SequenceTable(4, BLOCK_SIZE)
    first = admit(table, [1, 2, 3], [7], limit=4)
    second = admit(table, list(range(10)), [3, 4, 5], limit=30)
    append(table, first, 9)
    assert table.output(first).tolist() == [9]
    assert table.tokens[first, :4].tolist() == [1, 2, 3, 9]
    assert table.held_blocks(first).tolist() == [7]
    assert table.held_blocks(second).tolist() == [3, 4, 5]
    assert table.tokens.shape[1] >= 30
    assert table.blocks.shape[1] * BLOCK_SIZE >= table.tokens.shape[1]


def test_a_sequence_grows_until_its_limit_or_its_end() -> None:
    table = SequenceTable(4, BLOCK_SIZE)
    long, short, ended = (admit(table, [1, 2], [block], limit=limit) for block, limit in ((0, 9), (1, 3), (2, 9)))
    assert table.growing().tolist() == [long, short, ended]
    append(table, short, 5)
    table.ended[ended] = True
    assert table.growing().tolist() == [long]


def test_a_removed_sequence_takes_its_output_along_and_its_slot_is_used_again() -> None:
    table = SequenceTable(4, BLOCK_SIZE)
    first = admit(table, [1, 2], [0])
    admit(table, [3], [1])
    append(table, first, 7)
    table.ended[first] = True
    sequence = table.remove(first)
    assert sequence.output.tolist() == [7]
    assert sequence.tokens.tolist() == [1, 2, 7]
    assert len(table) == 1
    with pytest.raises(KeyError):
        table.sequence(first)
    assert table.admit(sequence, np.array([2], np.int32), 0, 30) == first
    assert table.num_tokens[first] == 3
    assert first in table.growing()


def test_more_stop_ids_than_before_widen_the_table_and_keep_the_others() -> None:
    table = SequenceTable(4, BLOCK_SIZE, end_token_ids=(0,))
    few = admit(table, [1], [0], Sampling(stop_token_ids=(1, 2)))
    many = admit(table, [1], [1], Sampling(stop_token_ids=tuple(range(10, 20))))
    alone = admit(table, [1], [2], Sampling(stop_token_ids=(5,), ignore_eos=True))
    assert set(table.stop_ids[few].tolist()) == {1, 2, 0, -1}
    assert set(table.stop_ids[many].tolist()) == {*range(10, 20), 0}
    assert set(table.stop_ids[alone].tolist()) == {5, -1}


def test_blocks_that_neighbours_share_are_nobodys_own() -> None:
    table = SequenceTable(4, BLOCK_SIZE)
    first = admit(table, [1] * (3 * BLOCK_SIZE), [0, 1, 2])
    request = Request(1, np.ones(2 * BLOCK_SIZE, np.int32), Sampling())
    second = table.admit(Sequence(request), np.array([0, 5], np.int32), BLOCK_SIZE, 30)
    alone = admit(table, [9], [7])
    assert [int(table.own_blocks()[slot]) for slot in (first, second, alone)] == [2, 1, 1]
    table.remove(second)
    assert [int(table.own_blocks()[slot]) for slot in (first, alone)] == [3, 1]


def test_samples_that_have_not_parted_are_counted_with_their_leader() -> None:
    table = SequenceTable(4, BLOCK_SIZE)
    request = Request(0, np.ones(BLOCK_SIZE, np.int32), Sampling(), samples=3, group=8, stop_after=5)
    leader = table.admit(Sequence(request, forks=2), np.array([3], np.int32), 0, 30)
    assert table.parting[leader] == 2
    sample = table.fork(leader)
    assert table.parting[[leader, sample]].tolist() == [1, 0]
    assert table.group[[leader, sample]].tolist() == [8, 8]
    assert table.stop_total[[leader, sample]].tolist() == [BLOCK_SIZE + 5] * 2
    table.remove(leader)
    assert not table.parting.any()
