"""Reference counts, and which block is given next."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_pool import BlockPool, OutOfBlocksError
from engine.prefix_index import BlockState, PrefixIndex
from engine.request import Reuse


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(num_blocks, 2)
    return BlockPool(num_blocks, index), index


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.live, pool.cached, pool.free


def hold(pool: BlockPool, index: PrefixIndex, *content: int) -> np.ndarray:
    """Blocks of a sequence, all full, written and indexed."""
    blocks = pool.allocate(len(content) // 2)
    index.insert(np.array(content, np.int32), blocks.tolist(), 0, len(blocks), BlockState.WRITTEN)
    return blocks


def test_blocks_without_content_worth_keeping_become_free() -> None:
    pool, _ = make_pool(4)
    blocks = pool.allocate(3)
    assert counts(pool) == (3, 0, 1)
    pool.release(blocks)
    assert counts(pool) == (0, 0, 4)


def test_written_indexed_blocks_stay_cached_until_their_place_is_needed() -> None:
    pool, index = make_pool(4)
    pool.release(hold(pool, index, 1, 2, 3, 4))
    assert counts(pool) == (0, 2, 2)
    pool.allocate(3)
    assert counts(pool) == (3, 1, 0)
    assert pool.evictions == 1
    assert len(index.match(np.array([1, 2, 3, 4], np.int32), 2)) == 1


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    # trap 7
    pool, index = make_pool(3)
    blocks = hold(pool, index, 1, 2, 3, 4, 5, 6)
    pool.release(blocks)
    pool.allocate(1)
    assert index.match(np.array([1, 2, 3, 4, 5, 6], np.int32), 3) == blocks[:2].tolist()


def test_a_shared_block_lives_until_its_last_holder_lets_go() -> None:
    pool, index = make_pool(3)
    blocks = hold(pool, index, 1, 2)
    pool.acquire(blocks.tolist())
    pool.release(blocks)
    assert counts(pool) == (1, 0, 2)
    pool.release(blocks)
    assert counts(pool) == (0, 1, 2)
    pool.acquire(blocks.tolist())
    assert counts(pool) == (1, 0, 2)


def test_an_indexed_block_that_nobody_filled_is_forgotten() -> None:
    pool, index = make_pool(3)
    blocks = pool.allocate(2)
    index.insert(np.array([1, 2, 3, 4], np.int32), blocks.tolist(), 0, 2, BlockState.PENDING)
    pool.release(blocks)
    assert counts(pool) == (0, 0, 3)
    assert len(index) == 0


def test_releasing_twice_is_an_error_and_changes_nothing() -> None:
    # trap 9
    pool, _ = make_pool(3)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks)
    assert counts(pool) == (0, 0, 3)


def test_asking_for_more_than_there_is_takes_nothing() -> None:
    pool, _ = make_pool(3)
    with pytest.raises(OutOfBlocksError, match="4 blocks asked for, 3 free and 0 cached of 3"):
        pool.allocate(4)
    assert counts(pool) == (0, 0, 3)


def test_forgotten_blocks_become_free_unless_somebody_holds_them() -> None:
    pool, index = make_pool(4)
    blocks = hold(pool, index, 1, 2, 3, 4, 5, 6)
    pool.acquire(blocks[:1].tolist())
    pool.release(blocks)
    assert counts(pool) == (1, 2, 1)
    pool.forget(blocks[:1])
    assert counts(pool) == (1, 0, 3)
    pool.release(blocks[:1])
    assert counts(pool) == (0, 0, 4)


def test_the_block_whose_next_use_is_farthest_is_evicted_tails_before_heads() -> None:
    # trap 7
    pool, index = make_pool(6)
    near, far, never = (hold(pool, index, *content) for content in ((1, 1, 2, 2), (3, 3, 4, 4), (5, 5, 6, 6)))
    pool.plan(never, 0, ())
    pool.plan(far, 1, (Reuse(4, 20),))
    pool.plan(near, 2, (Reuse(4, 5),))
    for blocks in (near, far, never):
        pool.release(blocks)
    order = [int(pool.allocate(1)[0]) for _ in range(6)]
    assert order == [*never[::-1], *far[::-1], *near[::-1]]


def test_what_a_block_builds_on_outlives_it_even_if_nobody_comes_for_that() -> None:
    # trap 7
    pool, index = make_pool(3)
    path = hold(pool, index, 1, 1, 2, 2)
    other = hold(pool, index, 3, 3)
    pool.plan(other, 0, ())
    pool.plan(path[1:], 1, (Reuse(2, 9),))
    pool.release(path)
    pool.release(other)
    assert [int(pool.allocate(1)[0]) for _ in range(3)] == [*other, *path[::-1]]


def test_the_blocks_of_a_preempted_sequence_are_evicted_last() -> None:
    pool, index = make_pool(4)
    preempted, planned = hold(pool, index, 1, 1, 2, 2), hold(pool, index, 3, 3, 4, 4)
    pool.plan(preempted, 0, ())
    pool.plan(planned, 1, (Reuse(4, 1),))
    pool.release(preempted, returning=True)
    pool.release(planned)
    assert set(pool.allocate(2).tolist()) == set(planned.tolist())
    pool.acquire(preempted.tolist())
    assert counts(pool) == (4, 0, 0)


def test_forgetting_the_end_of_a_path_lets_what_is_left_of_it_be_evicted() -> None:
    pool, index = make_pool(3)
    path = hold(pool, index, 1, 1, 2, 2, 3, 3)
    pool.release(path)
    pool.forget(path[1:])
    assert counts(pool) == (0, 1, 2)
    assert sorted(pool.allocate(3).tolist()) == [0, 1, 2]
    assert len(index) == 0
