"""The physical K/V blocks: who holds them, which are reusable, which are free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.eviction import Blocks, EvictionQueue
from engine.prefix_index import ROOT, BlockIds, BlockState, PrefixIndex
from engine.request import Reuse


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free or evictable; the caller must ask `available` first."""


class BlockPool:
    """Reference counts, the free list, and the unreferenced blocks that the prefix index still names.

    A block is live (held by at least one sequence), cached (held by none, indexed and written) or free.
    `live + cached + free == total` at all times. Cached blocks are evicted in the order of `EvictionQueue`: none
    before those that follow it.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.total = num_blocks
        self.evictions = 0
        self._index = index
        self._references: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free: Blocks = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: low ids leave first
        self._num_free = num_blocks
        self._cached = EvictionQueue(num_blocks, index.block_size)

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
        if count > self._num_free:
            self._evict(count - self._num_free)
        taken = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._references[taken] = 1
        return taken

    def acquire(self, blocks: BlockIds) -> None:
        """Hold blocks that the index named, one more reference each."""
        held = np.asarray(blocks, np.int32)
        self._cached.remove(held[self._references[held] == 0])
        self._cached.taken(held)
        self._references[held] += 1

    def plan(self, blocks: Blocks, ordinal: int, reuse: Sequence[Reuse]) -> None:
        """Note what the request that was added as the `ordinal`-th knows of its prompt's full blocks, all held.

        No use that was planned for this request, or for one before it, is still to come.
        """
        self._cached.plan(blocks, ordinal, reuse)
        self._cached.came(ordinal)

    def drop_plans(self) -> None:
        """No request that was added before comes any more: what is cached leaves in the order of its release."""
        self._cached.drop_plans()

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are held by nobody: those that `acquire` would make unavailable."""
        return int(np.count_nonzero(self._references[np.asarray(blocks, np.int32)] == 0))

    def release(self, blocks: Blocks, *, returning: bool = False) -> None:
        """Give back one reference of each block; `blocks` in sequence order.

        Written, indexed blocks stay cached; the rest becomes free. `returning` keeps them longest: a preempted
        sequence comes back for them.
        """
        if np.any(self._references[blocks] < 1):
            raise AssertionError(f"blocks released more often than held: {blocks[self._references[blocks] < 1]}")
        self._references[blocks] -= 1
        if returning:
            self._cached.keep_for_return(blocks)
        unreferenced = blocks[self._references[blocks] == 0][::-1]
        states = self._index.states(unreferenced)
        written = states == BlockState.WRITTEN
        for block in unreferenced[(states != BlockState.UNINDEXED) & ~written].tolist():
            self._index.remove(block)  # nobody is left to fill it
        kept = unreferenced[written]
        self._cached.add(kept, self._index.are_leaves(kept))
        self._set_free(unreferenced[~written])

    def forget(self, blocks: BlockIds) -> None:
        """Let nobody find `blocks` (in sequence order) or what follows them again; those held stay held."""
        before = self._index.before(blocks)
        gone = np.array([block for block in self._index.forget(blocks) if block in self._cached], np.int32)
        self._cached.remove(gone)
        self._set_free(gone)
        if before != ROOT and self._index.is_leaf(before):
            self._cached.uncover(before)

    def check(self) -> None:
        """Assert the pool's identity; for tests."""
        live = int(np.count_nonzero(self._references))
        if live + self.cached + self.free != self.total or np.any(self._references < 0):
            raise AssertionError(f"live {live} + cached {self.cached} + free {self.free} != total {self.total}")

    def _evict(self, count: int) -> None:
        evicted = np.empty(count, np.int32)
        for at in range(count):
            evicted[at] = block = self._cached.pop()
            parent = self._index.parent(block)
            self._index.remove(block)
            if parent != ROOT and self._index.is_leaf(parent):
                self._cached.uncover(parent)
        self._set_free(evicted)
        self.evictions += count

    def _set_free(self, blocks: Blocks) -> None:
        self._cached.reset(blocks)
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)
