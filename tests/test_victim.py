"""Which running sequence gives way."""

from __future__ import annotations

import numpy as np

from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable
from engine.victim import MOST_PREEMPTIONS, choose_victim


def table_of(*blocks: int, shared: int = 0, preemptions: tuple[int, ...] = ()) -> SequenceTable:
    """Sequences that hold so many blocks of four tokens; the first `shared` ones are the same in all."""
    table = SequenceTable(16, 4)
    for row, held in enumerate(blocks):
        sequence = Sequence(Request(row, np.ones(4 * held, np.int32), Sampling()))
        sequence.preemptions = preemptions[row] if preemptions else 0
        own = np.arange(shared, held) + 100 * (row + 1)
        table.admit(sequence, np.concatenate((np.arange(shared), own)).astype(np.int32), 4 * shared * bool(row), 1000)
    return table


def victim(table: SequenceTable, short: int) -> int:
    return table.sequence(choose_victim(table, short)).request.row_id


def test_the_smallest_one_that_brings_enough_gives_way() -> None:
    table = table_of(9, 7, 2, 4)
    assert victim(table, 1) == 2
    assert victim(table, 3) == 3
    assert victim(table, 5) == 1


def test_where_none_brings_enough_it_is_the_largest_and_of_equal_ones_the_latest() -> None:
    assert victim(table_of(50, 7, 9, 4), 20) == 2
    assert victim(table_of(5, 5, 5, 5), 2) == 3


def test_blocks_that_others_hold_bring_nothing() -> None:
    assert victim(table_of(30, 12, 14, shared=10), 3) == 2


def test_the_first_one_goes_on_unless_it_is_alone() -> None:
    assert victim(table_of(1, 20, 20), 1) != 0
    assert victim(table_of(3), 1) == 0


def test_one_that_gave_way_often_is_spared_and_where_all_did_the_latest_goes() -> None:
    most = MOST_PREEMPTIONS
    assert victim(table_of(9, 2, 8, 3, preemptions=(0, most, 0, most)), 1) == 2
    assert victim(table_of(9, 2, 8, 3, preemptions=(0, most, most, most)), 1) == 3
