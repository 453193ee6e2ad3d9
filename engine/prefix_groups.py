"""Which running sequences begin with the same blocks, so that attention reads those once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.attention_batch import PREFIX_LEVELS

FEWEST_SHARED_TOKENS = 64
"""Of a level. A sequence reads as many bytes for a few tokens as for the partial result that a level leaves."""

Slots = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixSegments:
    """Runs of blocks that several decodes of a step share; `kernels.attention_batch.SharedPrefixes` on the host.

    `segments` int32 [segments, 5]: slot whose block table names the blocks, first decode, number of decodes, first
    key, key after the last; a segment comes after the one it continues. `own_start` int32 [decodes]: keys before it
    are in segments. `own_segments` int32 [decodes, PREFIX_LEVELS]: a decode's segments from the outermost in, -1
    after the last.
    """

    segments: npt.NDArray[np.int32]
    own_start: npt.NDArray[np.int32]
    own_segments: npt.NDArray[np.int32]

    @property
    def saved_keys(self) -> int:
        """Keys that are not read again, in each layer and key/value head."""
        _, _, members, first, end = self.segments.astype(np.int64).T
        return int(((members - 1) * (end - first)).sum())

    @property
    def distinct_keys(self) -> int:
        """Keys of all segments, each read once."""
        return int((self.segments[:, 4] - self.segments[:, 3]).sum())

    @property
    def num_members(self) -> int:
        """Decodes of all segments, each counted once for every segment it is in."""
        return int(self.segments[:, 2].sum())


class PrefixOrder:
    """The running sequences in an order in which those that share leading blocks are neighbours.

    `slots` int64 [running] in that order, a depth-first walk of the trie of their block tables; `shared` int64
    [running] are the full leading blocks that each has in common with the one before it, 0 for the first. Blocks
    are shared for as long as both run, so nothing is compared twice.
    """

    def __init__(self, max_seqs: int) -> None:
        self._count = 0
        self._slots: Slots = np.empty(max_seqs, np.int64)
        self._shared: Counts = np.empty(max_seqs, np.int64)

    @property
    def slots(self) -> Slots:
        return self._slots[: self._count]

    @property
    def shared(self) -> Counts:
        return self._shared[: self._count]

    def insert(self, slot: int, blocks: npt.NDArray[np.int32], found: int, tables: npt.NDArray[np.int32]) -> None:
        """Put in a sequence whose first `found` blocks, and no others, may be in the `tables` of those that run.

        `blocks` int32 [held] is its block table, `tables` int32 [slots, width] that of all slots.
        """
        place, shared = self._count, 0
        if found and place:
            place, shared = self._place(blocks[:found], tables)
        self._put(place, slot, shared)

    def insert_after(self, leader: int, slot: int, shared: int) -> None:
        """Put in a sequence that has its first `shared` blocks from `leader`, which no other shares more of."""
        self._put(int(np.flatnonzero(self.slots == leader)[0]) + 1, slot, shared)

    def remove(self, slot: int) -> None:
        """Take a sequence out; its neighbours share what they both shared with it."""
        place, last = int(np.flatnonzero(self.slots == slot)[0]), self._count - 1
        if place < last:
            self._shared[place + 1] = min(self._shared[place], self._shared[place + 1])
        for values in (self._slots, self._shared):
            values[place:last] = values[place + 1 : self._count]
        self._count = last

    def _put(self, place: int, slot: int, shared: int) -> None:
        """Insert at `place`; what is behind shares no more with it than with what was before."""
        if place < self._count:
            self._shared[place] = min(int(self._shared[place]), shared)
        for values, value in ((self._slots, slot), (self._shared, shared)):
            values[place + 1 : self._count + 1] = values[place : self._count]
            values[place] = value
        self._count += 1

    def _place(self, blocks: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Where a sequence belongs, and how many of its `blocks` the one before that place has.

        Behind the last of those that share the most with it. It mostly follows the one that came last.
        """
        if np.array_equal(tables[self.slots[-1], : len(blocks)], blocks):
            return self._count, len(blocks)
        candidates = np.flatnonzero(tables[self.slots, 0] == blocks[0])
        if not len(candidates):
            return self._count, 0
        differing = tables[self.slots[candidates], : len(blocks)] != blocks
        shared = np.where(differing.any(axis=1), differing.argmax(axis=1), len(blocks))
        most = int(shared.max())
        return int(candidates[np.flatnonzero(shared == most)[-1]]) + 1, most


def prefix_segments(
    order: PrefixOrder, decodes: Slots, context_lens: Counts, block_size: int
) -> tuple[Slots, PrefixSegments] | None:
    """`decodes` int64 [decodes] in the order of `order`, with what they share; None if they share nothing.

    `context_lens` int64 [slots] counts the keys that the decode of each slot sees: at least its last one is left for
    itself. Takes time in the number of sequences for each level, in array operations.
    """
    if not order.shared.any():
        return None
    decoding = np.zeros(len(context_lens), np.bool_)
    decoding[decodes] = True
    kept = np.flatnonzero(decoding[order.slots])
    if len(kept) < 2:
        return None
    slots = order.slots[kept]
    shared = np.zeros(len(kept), np.int64)
    # Neighbours after others are left out share the least that was shared between them.
    shared[1:] = np.minimum.reduceat(order.shared[: kept[-1] + 1], kept[:-1] + 1)
    most = (context_lens[slots] - 1) // block_size
    shared[1:] = np.minimum(shared[1:], np.minimum(most[1:], most[:-1]))
    segments = _nested(slots, shared, block_size)
    return None if segments is None else (slots, segments)


def _nested(slots: Slots, shared: Counts, block_size: int) -> PrefixSegments | None:
    """The segments of sequences in order, of which each shares `shared` blocks with the one before it."""
    fewest = -(-FEWEST_SHARED_TOKENS // block_size)
    covered = np.zeros(len(slots), np.int64)
    own = np.full((len(slots), PREFIX_LEVELS), -1, np.int32)
    levels: list[npt.NDArray[np.int64]] = []
    count = 0
    for level in range(PREFIX_LEVELS):
        apart = shared - covered < fewest
        apart[0] = True
        starts = np.flatnonzero(apart)
        members = np.diff(starts, append=len(slots))
        several = members > 1
        if not several.any():
            break
        # What a run has in common is the least that neighbours in it have; its first one is a neighbour outside.
        inside = np.where(apart, np.iinfo(np.int64).max, shared)
        ends = np.where(several, np.minimum.reduceat(inside, starts), covered[starts])
        firsts = starts[several]
        found = np.stack((slots[firsts], firsts, members[several], covered[firsts], ends[several]), axis=1)
        own[:, level] = np.repeat(np.where(several, count + np.cumsum(several) - 1, -1), members)
        covered = np.repeat(ends, members)
        levels.append(found)
        count += len(found)
    if not levels:
        return None
    segments = np.concatenate(levels)
    segments[:, 3:] *= block_size
    return PrefixSegments(segments.astype(np.int32), (covered * block_size).astype(np.int32), own)
