"""Prefix groups against a plain search: which running sequences share which leading blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefix_groups import FEWEST_SHARED_TOKENS, PrefixOrder, prefix_segments
from kernels.attention_batch import PREFIX_LEVELS

WIDTH = 8
NOTHING = -5


def leading(one: list[int], other: list[int]) -> int:
    """Leading entries that two block tables have in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Running:
    """Sequences that come and go, with blocks named by the path in a trie that leads to them."""

    def __init__(self) -> None:
        self.order = PrefixOrder(16)
        self.tables = np.full((16, WIDTH), NOTHING, np.int32)
        self.held: dict[int, list[int]] = {}
        self.names: dict[tuple[int, ...], int] = {}
        self.next_block = 0

    def start(self, slot: int, path: tuple[int, ...]) -> None:
        held, live = [], {block for blocks in self.held.values() for block in blocks}
        for depth in range(len(path)):
            name = self.names.get(path[: depth + 1])
            if name not in live:  # nobody holds it any more: it is another block from now on
                name = self.names[path[: depth + 1]] = self.next_block
                self.next_block += 1
            held.append(name)
        found = max((leading(held, other) for other in self.held.values()), default=0)
        self.tables[slot] = NOTHING
        self.tables[slot, : len(held)] = held
        self.order.insert(slot, np.array(held, np.int32), found, self.tables)
        self.held[slot] = held

    def stop(self, slot: int) -> None:
        self.order.remove(slot)
        del self.held[slot]


MOVES = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(moves=MOVES, left_out=st.sets(st.integers(0, 9), max_size=3))
def test_neighbours_share_the_most_and_segments_are_what_members_have_in_common(
    moves: list[tuple[int, list[int]]], left_out: set[int]
) -> None:
    running = Running()
    for slot, path in moves:
        if slot in running.held:
            running.stop(slot)
        else:
            running.start(slot, tuple(path))
        order = running.order
        assert sorted(order.slots.tolist()) == sorted(running.held)
        tables = [running.held[each] for each in order.slots.tolist()]
        assert order.shared.tolist() == [leading(tables[at - 1], table) if at else 0 for at, table in enumerate(tables)]
        for first in range(len(tables)):  # a depth-first walk: what lies between two shares what both share
            for last in range(first + 1, len(tables)):
                assert order.shared[first + 1 : last + 1].min() == leading(tables[first], tables[last])
    decodes = np.array([slot for slot in running.held if slot not in left_out], np.int64)
    context = np.zeros(16, np.int64)
    for slot, held in running.held.items():
        context[slot] = len(held) * FEWEST_SHARED_TOKENS + 1
    found = prefix_segments(running.order, decodes, context, FEWEST_SHARED_TOKENS)
    several = {tuple(running.held[slot][:1]) for slot in decodes.tolist()}
    if found is None:
        assert len(several) == len(decodes)
        return
    slots, prefixes = found
    assert sorted(slots.tolist()) == sorted(decodes.tolist())
    covered = np.zeros(len(slots), int)
    for at, (slot, first, members, begin, end) in enumerate(prefixes.segments.tolist()):
        group = slots[first : first + members].tolist()
        assert slot in group
        assert np.all(covered[first : first + members] == begin)
        common = min(leading(running.held[slot], running.held[each]) for each in group)
        assert end == common * FEWEST_SHARED_TOKENS > begin
        neighbours = [slots[place] for place in (first - 1, first + members) if 0 <= place < len(slots)]
        for each in neighbours:  # whoever shares more than the segment begins with is a member
            assert leading(running.held[slot], running.held[int(each)]) * FEWEST_SHARED_TOKENS <= begin
        assert np.all((prefixes.own_segments[first : first + members] == at).sum(axis=1) == 1)
        covered[first : first + members] = end
    assert prefixes.own_start.tolist() == covered.tolist()
    assert prefixes.num_members == (prefixes.own_segments >= 0).sum()


def test_a_sequence_keeps_a_key_to_itself_and_short_prefixes_are_not_grouped() -> None:
    order, size = PrefixOrder(2), 16
    tables = np.arange(2 * 8, dtype=np.int32).reshape(2, 8)
    tables[1, :5] = tables[0, :5]
    for slot in (0, 1):
        order.insert(slot, tables[slot], 5, tables)
    both = np.array([1, 0])
    context = np.array([5 * size, 100])  # the first sees its five blocks and nothing else
    found = prefix_segments(order, both, context, size)
    assert found is not None
    assert found[0].tolist() == [0, 1]
    assert found[1].own_start.tolist() == [4 * size] * 2
    assert found[1].saved_keys == 4 * size
    assert prefix_segments(order, both, np.array([4 * size, 100]), size) is None, "three blocks are too few"
    assert prefix_segments(order, both[:1], context, size) is None


def test_levels_deeper_than_the_last_are_left_to_the_sequences() -> None:
    size, depth = FEWEST_SHARED_TOKENS, PREFIX_LEVELS + 2
    order = PrefixOrder(depth)
    tables = np.zeros((depth, depth), np.int32)
    for slot in range(depth):  # each shares one block more with the next than the one before did
        tables[slot] = np.where(np.arange(depth) <= slot, np.arange(depth), 100 + 10 * slot + np.arange(depth))
        order.insert(slot, tables[slot], slot, tables)
    found = prefix_segments(order, np.arange(depth), np.full(depth, 100 * size), size)
    assert found is not None
    assert len(found[1].segments) == PREFIX_LEVELS
    assert found[1].own_segments.max() == PREFIX_LEVELS - 1
    assert found[1].own_start.max() == PREFIX_LEVELS * size
