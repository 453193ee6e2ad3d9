from __future__ import annotations

import random

import pytest

from benchmarks.contiguous_memory import Buddy, ContiguousMemory, FirstFit


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    memory = FirstFit(10)
    assert [memory.take(slots) for slots in (3, 2, 3)] == [0, 3, 5]
    memory.give_back(0)
    assert memory.take(4) is None  # 3 + 2 slots are free, and not side by side
    assert memory.take(2) == 0
    assert memory.take(2) == 8
    assert memory.take(1) == 2


def test_first_fit_joins_holes_on_both_sides() -> None:
    memory = FirstFit(9)
    starts = [memory.take(3) for _ in range(3)]
    for start in (starts[0], starts[2], starts[1]):
        assert start is not None
        memory.give_back(start)
    assert memory.take(9) == 0


def test_buddy_takes_powers_of_two_and_joins_only_halves_of_one_run() -> None:
    memory = Buddy(16)
    assert [memory.taken(slots) for slots in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]
    assert [memory.take(4) for _ in range(4)] == [0, 4, 8, 12]
    memory.give_back(4)
    memory.give_back(8)
    assert memory.take(5) is None  # 4 to 12 are free, and no half of anything
    memory.give_back(0)
    assert memory.take(5) == 0


def test_a_buddy_capacity_that_is_no_power_of_two_is_used_to_its_last_slot() -> None:
    memory = Buddy(13)
    assert [memory.take(slots) for slots in (8, 4, 1, 1)] == [0, 8, 12, None]
    for start in (12, 8, 0):
        memory.give_back(start)
    assert memory.take(9) is None
    assert memory.take(8) == 0


@pytest.mark.parametrize("memory", [FirstFit(100), Buddy(100)])
def test_runs_never_overlap_and_all_memory_comes_back(memory: ContiguousMemory) -> None:
    rng = random.Random(0)
    runs: dict[int, int] = {}
    for _ in range(2000):
        slots = rng.randint(1, 20)
        start = memory.take(slots)
        if start is None:
            memory.give_back(gone := rng.choice(list(runs)))
            del runs[gone]
            continue
        end = start + memory.taken(slots)
        assert 0 <= start < end <= 100
        assert all(end <= other or start >= other + taken for other, taken in runs.items())
        runs[start] = end - start
    for start in runs:
        memory.give_back(start)
    assert memory.take(64) == 0


@pytest.mark.parametrize("memory", [FirstFit(8), Buddy(8)])
def test_a_run_that_was_not_taken_cannot_be_given_back(memory: ContiguousMemory) -> None:
    with pytest.raises(KeyError):
        memory.give_back(3)
