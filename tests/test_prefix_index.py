"""The index of full blocks: found by content, inserted downwards, removed leaves first."""

from __future__ import annotations

import numpy as np
import pytest

import engine.prefix_index
from engine.prefix_index import ROOT, BlockKey, BlockState, PrefixIndex


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def index_of(*, blocks: list[int], content: np.ndarray, size: int = 2) -> PrefixIndex:
    index = PrefixIndex(10, size)
    index.insert(content, blocks, 0, len(blocks), BlockState.WRITTEN)
    return index


class OneBucketKey(BlockKey):
    """A key whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


def test_with_a_constant_hash_different_blocks_never_share(monkeypatch: pytest.MonkeyPatch) -> None:
    # trap 1
    monkeypatch.setattr(engine.prefix_index, "BlockKey", OneBucketKey)
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    index.insert(tokens(5, 6), [5], 0, 1, BlockState.WRITTEN)
    assert hash(OneBucketKey(ROOT, b"a")) == hash(OneBucketKey(3, b"b"))
    assert index.match(tokens(1, 2, 3, 4), 2) == [3, 4]
    assert index.match(tokens(5, 6, 3, 4), 2) == [5]
    assert index.match(tokens(3, 4, 1, 2), 2) == []


def test_the_same_tokens_after_other_tokens_are_another_block() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 9, 9))
    assert index.match(tokens(9, 9), 1) == []
    assert index.match(tokens(1, 2, 9, 9, 9), 2) == [3, 4]


def test_only_full_blocks_and_no_more_than_asked_are_matched() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    assert index.match(tokens(1, 2, 3), 1) == [3]
    assert index.match(tokens(1, 2, 3, 4), 1) == [3]


def test_a_block_that_repeats_an_indexed_one_ends_the_insertion() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    index.insert(tokens(1, 2, 3, 4, 5, 6), [3, 7, 8], 1, 3, BlockState.WRITTEN)
    assert index.match(tokens(1, 2, 3, 4, 5, 6), 3) == [3, 4]
    assert index.state(8) is BlockState.UNINDEXED


def test_a_block_cannot_leave_before_those_that_follow_it() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    with pytest.raises(AssertionError, match="block 3 leaves the index before 1"):
        index.remove(3)
    index.remove(4)
    index.remove(3)
    assert len(index) == 0
    assert index.match(tokens(1, 2), 1) == []


def test_marking_moves_only_blocks_in_the_expected_state() -> None:
    index = index_of(blocks=[3], content=tokens(1, 2))
    index.insert(tokens(1, 2, 3, 4), [3, 4], 1, 2, BlockState.PENDING)
    index.mark(np.array([3, 4, 5], np.int32), BlockState.PENDING, BlockState.FILLING)
    assert [index.state(block) for block in (3, 4, 5)] == [
        BlockState.WRITTEN,
        BlockState.FILLING,
        BlockState.UNINDEXED,
    ]
    assert index.in_state([3, 4, 5], BlockState.FILLING) == 1


def test_parents_lead_back_to_the_root() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    assert (index.parent(4), index.parent(3)) == (3, ROOT)
    with pytest.raises(KeyError):
        index.parent(5)


def test_forgetting_a_block_forgets_all_that_follow_it_on_every_branch() -> None:
    index = index_of(blocks=[3, 4, 5], content=tokens(1, 2, 3, 4, 5, 6))
    index.insert(tokens(1, 2, 7, 8, 9, 9), [3, 6, 7], 1, 3, BlockState.PENDING)
    index.insert(tokens(8, 8), [9], 0, 1, BlockState.WRITTEN)
    assert sorted(index.forget([4])) == [4, 5]
    assert sorted(index.forget([3, 6])) == [3, 6, 7]
    assert index.forget([3]) == []
    assert len(index) == 1
    assert index.is_leaf(3)


def test_a_remembered_path_ends_where_a_block_of_it_left_the_index() -> None:
    content = tokens(1, 2, 3, 4, 5, 6)
    index = index_of(blocks=[3, 4, 5], content=content)
    assert index.match(content, 3) == [3, 4, 5]
    index.remove(5)
    assert index.match(content, 3) == [3, 4]
    index.insert(content, [3, 4, 7], 2, 3, BlockState.WRITTEN)
    assert index.match(content, 3) == [3, 4, 7]
    assert index.match(content, 1) == [3]
    index.forget([3])
    assert index.match(content, 3) == []


def test_a_path_that_parts_from_the_remembered_one_is_found_beyond_it() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    index.insert(tokens(1, 2, 5, 6), [3, 6], 1, 2, BlockState.WRITTEN)
    assert index.match(tokens(1, 2, 3, 4), 2) == [3, 4]
    assert index.match(tokens(1, 2, 5, 6), 2) == [3, 6]
    assert index.match(tokens(1, 9, 5, 6), 2) == []
    assert index.match(tokens(1, 2, 5, 6), 2) == [3, 6]


def test_leaves_and_what_comes_before_a_path_are_known() -> None:
    index = index_of(blocks=[3, 4], content=tokens(1, 2, 3, 4))
    assert index.are_leaves(np.array([3, 4, 9], np.int32)).tolist() == [False, True, True]
    assert (index.before([4]), index.before([3, 4]), index.before([8, 4]), index.before([])) == (3, ROOT, 3, ROOT)
