"""Which unreferenced block gives way: by next use, then by release, leaves only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.eviction import EvictionQueue
from engine.request import Reuse
from tests.fake_executor import FailedStepError, check_invariants, expected_output, make_engine, request

BLOCK_SIZE = 2


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def queue_of(num_blocks: int = 8) -> EvictionQueue:
    return EvictionQueue(num_blocks, BLOCK_SIZE)


def add(queue: EvictionQueue, ids: Sequence[int], *, leaves: bool = True) -> None:
    queue.add(blocks(*ids), np.full(len(ids), leaves))


def drained(queue: EvictionQueue) -> list[int]:
    return [queue.pop() for _ in range(len(queue))]


def test_without_plans_the_least_recently_released_leaves_first() -> None:
    queue = queue_of()
    add(queue, [3, 1])
    add(queue, [2])
    queue.remove(blocks(3))
    add(queue, [3])
    assert drained(queue) == [1, 2, 3]


def test_never_goes_before_the_farthest_next_use_and_that_before_nearer_ones() -> None:
    queue = queue_of()
    for ordinal, (block, distance) in enumerate([(0, 5), (1, 50), (2, None), (3, 20), (4, None)]):
        queue.plan(blocks(block), ordinal, () if distance is None else (Reuse(BLOCK_SIZE, distance),))
    add(queue, [0, 1, 2, 3, 4])
    assert drained(queue) == [2, 4, 1, 3, 0]


def test_a_plan_counts_in_whole_blocks_and_the_soonest_use_of_a_block_holds() -> None:
    queue = queue_of()
    queue.plan(blocks(0, 1, 2, 3), 0, (Reuse(3, 1), Reuse(6, 4)))
    add(queue, [0, 1, 2, 3])
    assert drained(queue) == [3, 1, 2, 0]


def test_what_a_later_request_knows_of_a_block_is_not_overwritten_by_an_earlier_one() -> None:
    queue = queue_of()
    queue.plan(blocks(0), 5, (Reuse(2, 100),))
    queue.plan(blocks(0), 3, (Reuse(2, 2),))  # it was preempted, and is back
    queue.plan(blocks(1), 6, (Reuse(2, 50),))
    add(queue, [1, 0])
    assert drained(queue) == [0, 1]


def test_a_use_that_went_by_without_its_request_taking_the_block_is_none() -> None:
    queue = queue_of()
    queue.plan(blocks(0, 1), 0, (Reuse(4, 2),))
    queue.plan(blocks(2), 1, (Reuse(2, 9),))
    add(queue, [1, 0, 2])
    queue.came(1)
    assert queue.pop() == 2
    queue.came(2)  # without the blocks
    queue.plan(blocks(3, 4), 3, (Reuse(2, 1),))
    add(queue, [3, 4])
    assert drained(queue) == [1, 0, 4, 3]


def test_a_use_that_went_by_while_the_block_was_held_is_none() -> None:
    queue = queue_of()
    queue.plan(blocks(0), 0, (Reuse(2, 1),))
    queue.came(1)
    queue.plan(blocks(1), 2, (Reuse(2, 5),))
    add(queue, [1, 0])
    assert drained(queue) == [0, 1]


def test_what_a_preempted_sequence_comes_back_for_leaves_last_until_it_is_taken() -> None:
    queue = queue_of()
    queue.plan(blocks(1), 1, (Reuse(2, 1),))
    queue.keep_for_return(blocks(0))
    add(queue, [0, 1])
    queue.came(10**6)
    assert queue.pop() == 1
    queue.remove(blocks(0))
    queue.taken(blocks(0))
    queue.plan(blocks(2), 10**6, (Reuse(2, 5),))
    add(queue, [2, 0])
    assert drained(queue) == [0, 2]


def test_a_block_leaves_only_when_nothing_follows_it() -> None:
    # trap 7
    queue = queue_of()
    add(queue, [0], leaves=False)
    add(queue, [1])
    assert queue.pop() == 1
    assert 0 in queue
    queue.uncover(0)
    queue.uncover(5)  # somebody holds it
    assert drained(queue) == [0]


def test_a_block_that_holds_something_else_has_no_plan() -> None:
    queue = queue_of()
    queue.plan(blocks(0), 7, (Reuse(2, 1),))
    queue.keep_for_return(blocks(1))
    queue.reset(blocks(0, 1))
    queue.plan(blocks(0), 0, ())
    add(queue, [1, 0])
    assert drained(queue) == [1, 0]


def test_once_plans_are_dropped_the_release_decides() -> None:
    queue = queue_of()
    queue.plan(blocks(0), 0, (Reuse(2, 3),))
    queue.keep_for_return(blocks(1))
    add(queue, [1, 0, 2])
    queue.drop_plans()
    assert drained(queue) == [1, 0, 2]


def test_entries_of_blocks_that_were_taken_do_not_pile_up() -> None:
    queue = queue_of(4)
    for turn in range(1000):
        queue.plan(blocks(0), turn, (Reuse(2, 10**6),))
        add(queue, [0])
        queue.remove(blocks(0))
    assert len(queue._leaves) <= 9
    assert len(queue._expiring) <= 9
    add(queue, [0, 1])
    assert drained(queue) == [1, 0]


PLANS = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), max_size=3).map(
    lambda steps: tuple(map(Reuse, sorted({tokens for tokens, _ in steps}), sorted({far for _, far in steps})))
)
ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=20), st.integers(1, 10), PLANS), min_size=1, max_size=14
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=ROWS,
    num_blocks=st.integers(8, 20),
    block_size=st.sampled_from([1, 2, 4]),
    max_seqs=st.integers(1, 6),
    fail_steps=st.frozensets(st.integers(0, 20), max_size=2),
    cancel_after=st.none() | st.integers(1, 12),
    async_steps=st.booleans(),
)
def test_plans_right_or_wrong_change_no_answer_and_pin_no_block(
    rows: list[tuple[list[int], int, tuple[Reuse, ...]]],
    num_blocks: int,
    block_size: int,
    max_seqs: int,
    fail_steps: frozenset[int],
    cancel_after: int | None,
    async_steps: bool,
) -> None:
    # traps 7, 9, 12, 18
    engine, _ = make_engine(
        num_blocks,
        block_size,
        max_seqs=max_seqs,
        max_batch_tokens=20,
        fail_steps=fail_steps,
        async_steps=async_steps,
    )
    requests = [
        replace(request(row, prompt, max_tokens=count), reuse=plan) for row, (prompt, count, plan) in enumerate(rows)
    ]
    for attempt in range(2):
        for each in requests:
            engine.add(each)
        steps = 0
        while engine.has_work:
            steps += 1
            if attempt == 0 and steps == cancel_after:
                engine.cancel()
                check_invariants(engine)
                break
            with contextlib.suppress(FailedStepError):
                for completion in engine.step().completions:
                    if completion.error is None:
                        expected = expected_output(requests[completion.row_id], engine.limits.max_model_len)
                        assert completion.token_ids.tolist() == expected
            check_invariants(engine)
    pool = engine._pool
    assert len(pool.allocate(pool.total)) == num_blocks
    assert len(engine._index) == 0
