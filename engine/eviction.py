"""Which unreferenced block gives way next."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from engine.request import Reuse

Blocks = npt.NDArray[np.int32]
Entry = tuple[int, int, int]
"""Key, stamp, block."""

NEVER = int(np.iinfo(np.int64).max)
"""Next use of a block that no request is known to come for."""
SOON = -1
"""Next use of a block that a preempted sequence comes back for: before all requests that have not started."""
NOBODY = -1
NOT_IN = -1


class EvictionQueue:
    """The unreferenced, indexed blocks, of which the one whose next use is farthest, or never, leaves first.

    Among blocks of equal next use, the least recently released leaves first. Only leaves of the prefix index leave:
    a block has its place in the queue from the moment when nothing follows it any more. Next uses are told by
    the plans of requests (`Request.reuse`) as ordinals, counted in the order in which requests were added; one that
    went by without its request taking the block is no use any more. Without plans the queue is one of least
    recently released blocks.

    A change costs the logarithm of the number of blocks: entries of blocks that left otherwise stay in the heaps
    until they come up, or until these are twice as long as there are blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._next_use: npt.NDArray[np.int64] = np.full(num_blocks, NEVER, np.int64)
        self._planned_by: npt.NDArray[np.int64] = np.full(num_blocks, NOBODY, np.int64)
        self._awaited: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._stamp: npt.NDArray[np.int64] = np.full(num_blocks, NOT_IN, np.int64)  # grows with every release
        self._next_stamp = 0
        self._count = 0
        self._came = 0  # requests below this ordinal have started, or never will
        self._leaves: list[Entry] = []  # by next use, farthest first
        self._expiring: list[Entry] = []  # those of a planned use, soonest first
        self._longest = 2 * num_blocks

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._stamp[block] != NOT_IN)

    @property
    def blocks(self) -> Blocks:
        """Those in the queue, in no particular order."""
        return np.flatnonzero(self._stamp != NOT_IN).astype(np.int32)

    def plan(self, blocks: Blocks, ordinal: int, reuse: Sequence[Reuse]) -> None:
        """Note when the full blocks of a prompt, from its first on and all held, are needed next.

        What a later request said of a block stands: it knows the same uses without those that are over.
        """
        next_use = np.full(len(blocks), NEVER, np.int64)
        for tokens, distance in reversed(reuse):
            next_use[: tokens // self._block_size] = ordinal + distance
        newest = self._planned_by[blocks] <= ordinal
        self._next_use[blocks[newest]] = next_use[newest]
        self._planned_by[blocks[newest]] = ordinal

    def keep_for_return(self, blocks: Blocks) -> None:
        """A sequence that is preempted comes back for these blocks, all held."""
        self._awaited[blocks] = True

    def taken(self, blocks: Blocks) -> None:
        """A sequence that was preempted is back, or another took its blocks and hands them on."""
        self._awaited[blocks] = False

    def came(self, ordinal: int) -> None:
        """A request took what it found: no use planned for it, or for one before it, is still to come."""
        self._came = max(self._came, ordinal + 1)
        while self._expiring and self._expiring[0][0] < self._came:
            _, stamp, block = heappop(self._expiring)
            if self._stamp[block] == stamp:
                heappush(self._leaves, (-NEVER, stamp, block))

    def drop_plans(self) -> None:
        """No request that was added before comes any more."""
        self._next_use[:] = NEVER
        self._planned_by[:] = NOBODY
        self._awaited[:] = False
        self._expiring.clear()
        self._leaves = [(-NEVER, stamp, block) for _, stamp, block in self._leaves if self._stamp[block] == stamp]
        heapify(self._leaves)

    def add(self, blocks: Blocks, leaves: npt.NDArray[np.bool_]) -> None:
        """Take in blocks that nobody holds any more, tails first; `leaves` [blocks] are those that none follows."""
        self._stamp[blocks] = np.arange(self._next_stamp, self._next_stamp + len(blocks))
        self._next_stamp += len(blocks)
        self._count += len(blocks)
        for block in blocks[leaves].tolist():
            self._push(block)

    def remove(self, blocks: Blocks) -> None:
        """Take out blocks, all of the queue, that somebody holds again or nobody may find any more."""
        self._stamp[blocks] = NOT_IN
        self._count -= len(blocks)

    def uncover(self, block: int) -> None:
        """Nothing follows `block` any more; it may leave if it is in the queue."""
        if block in self:
            self._push(block)

    def pop(self) -> int:
        """The block that gives way; there must be one."""
        while True:
            _, stamp, block = heappop(self._leaves)
            if self._stamp[block] == stamp:
                self._stamp[block] = NOT_IN
                self._count -= 1
                return block

    def reset(self, blocks: Blocks) -> None:
        """Forget the plans for blocks that hold nothing any more."""
        self._next_use[blocks] = NEVER
        self._planned_by[blocks] = NOBODY
        self._awaited[blocks] = False

    def _push(self, block: int) -> None:
        stamp = int(self._stamp[block])
        next_use = SOON if self._awaited[block] else int(self._next_use[block])
        if self._came <= next_use < NEVER:
            self._expiring = self._in_bounds(self._expiring)
            heappush(self._expiring, (next_use, stamp, block))
        elif next_use != SOON:
            next_use = NEVER
        self._leaves = self._in_bounds(self._leaves)
        heappush(self._leaves, (-next_use, stamp, block))

    def _in_bounds(self, heap: list[Entry]) -> list[Entry]:
        """The heap, without what is outdated if it has grown too long."""
        if len(heap) <= self._longest:
            return heap
        valid = [entry for entry in heap if self._stamp[entry[2]] == entry[1]]
        heapify(valid)
        return valid
