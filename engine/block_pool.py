"""The physical K/V blocks: who holds them, which are reusable, which are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.prefix_index import BlockIds, BlockState, PrefixIndex

Blocks = npt.NDArray[np.int32]


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free or evictable; the caller must ask `available` first."""


class BlockPool:
    """Reference counts, the free list, and the unreferenced blocks that the prefix index still names.

    A block is live (held by at least one sequence), cached (held by none, indexed and written) or free.
    `live + cached + free == total` at all times. The least recently released cached block is evicted
    first; since sequences release their tails first, no block is evicted before those that follow it.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.total = num_blocks
        self.evictions = 0
        self._index = index
        self._references: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free: Blocks = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: low ids leave first
        self._num_free = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return self._num_free

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def live(self) -> int:
        return self.total - self._num_free - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and, by eviction, cached ones."""
        return self._num_free + len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return int(self._references[block])

    def allocate(self, count: int) -> Blocks:
        """Take `count` blocks that nobody else holds; int32 [count]. Raises OutOfBlocksError."""
        if count > self.available:
            raise OutOfBlocksError(
                f"{count} blocks asked for, {self.free} free and {self.cached} cached of {self.total}"
            )
        for _ in range(count - self._num_free):
            self._evict()
        taken = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._references[taken] = 1
        return taken

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold blocks that the index named, one more reference each."""
        held = np.asarray(blocks, np.int32)
        for block in held[self._references[held] == 0].tolist():
            del self._cached[block]
        self._references[held] += 1

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are held by nobody: those that `acquire` would make unavailable."""
        return int(np.count_nonzero(self._references[np.asarray(blocks, np.int32)] == 0))

    def release(self, blocks: Blocks) -> None:
        """Give back one reference of each block; `blocks` in sequence order.

        Written, indexed blocks stay cached; the rest becomes free. Tails go first, so that what a cached
        block builds on is never evicted before it.
        """
        if np.any(self._references[blocks] < 1):
            raise AssertionError(f"blocks released more often than held: {blocks[self._references[blocks] < 1]}")
        self._references[blocks] -= 1
        unreferenced = blocks[self._references[blocks] == 0][::-1]
        states = self._index.states(unreferenced)
        written = states == BlockState.WRITTEN
        self._cached.update(dict.fromkeys(unreferenced[written].tolist()))
        for block in unreferenced[(states != BlockState.UNINDEXED) & ~written].tolist():
            self._index.remove(block)  # nobody is left to fill it
        freed = unreferenced[~written]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def forget(self, blocks: BlockIds) -> None:
        """Let nobody find `blocks` (in sequence order) or what follows them again; those held stay held."""
        for block in self._index.forget(blocks):
            if block in self._cached:
                del self._cached[block]
                self._push_free(block)

    def check(self) -> None:
        """Assert the pool's identity; for tests."""
        live = int(np.count_nonzero(self._references))
        if live + self.cached + self.free != self.total or np.any(self._references < 0):
            raise AssertionError(f"live {live} + cached {self.cached} + free {self.free} != total {self.total}")

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._index.remove(block)
        self._push_free(block)
        self.evictions += 1

    def _push_free(self, block: int) -> None:
        self._free[self._num_free] = block
        self._num_free += 1
