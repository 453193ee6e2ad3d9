"""Which physical block holds the K/V of which tokens: a trie of full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.request import TokenIds

BlockIds = Sequence[int] | npt.NDArray[np.int32]
ROOT = -1  # parent of a sequence's first block


class BlockState(IntEnum):
    """What a block's entry in the index promises about its K/V."""

    UNINDEXED = 0
    PENDING = 1  # a running sequence fills it in a later step
    FILLING = 2  # the step being scheduled fills it, so this very step may read it
    WRITTEN = 3


class BlockKey(NamedTuple):
    """A block's identity: the physical block before it and its own tokens, compared in full.

    A block is indexed only below an indexed parent and is removed before it, so equal keys mean equal
    tokens all the way from the start of the sequence. The hash only finds the bucket.
    """

    parent: int
    tokens: bytes


class PrefixIndex:
    """Finds full blocks by content.

    Every indexed block has an indexed parent (or is a first block): entries are inserted from the root
    down and removed leaves first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents: npt.NDArray[np.int32] = np.full(num_blocks, ROOT, np.int32)
        self._children: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._state: npt.NDArray[np.int8] = np.zeros(num_blocks, np.int8)

    def __len__(self) -> int:
        return len(self._blocks)

    def state(self, block: int) -> BlockState:
        """What the index promises about `block`."""
        return BlockState(int(self._state[block]))

    def is_written(self, block: int) -> bool:
        """Whether `block` is indexed and has its K/V."""
        return bool(self._state[block] == BlockState.WRITTEN)

    def is_leaf(self, block: int) -> bool:
        """Whether no indexed block continues `block`."""
        return not self._children[block]

    def parent(self, block: int) -> int:
        """The indexed block before `block`, or ROOT. Raises KeyError if `block` is not indexed."""
        key = self._keys[block]
        if key is None:
            raise KeyError(block)
        return key.parent

    def match(self, tokens: TokenIds, max_blocks: int) -> list[int]:
        """The indexed blocks that hold the first tokens of a sequence, in order, at most `max_blocks`."""
        found: list[int] = []
        parent = ROOT
        for key in self._block_tokens(tokens, 0, max_blocks):
            block = self._blocks.get(BlockKey(parent, key))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def insert(self, tokens: TokenIds, blocks: BlockIds, start: int, end: int, state: BlockState) -> None:
        """Index blocks `start` to `end` of a sequence, whose earlier blocks are indexed.

        Stops at the first block whose content another block already stands for: what follows could
        not be a child of a block that this sequence does not hold.
        """
        parent = int(blocks[start - 1]) if start else ROOT
        for position, key in enumerate(self._block_tokens(tokens, start, end), start):
            block = int(blocks[position])
            entry = BlockKey(parent, key)
            holder = self._blocks.setdefault(entry, block)
            if holder != block:
                return
            if self._keys[block] is None:
                self._keys[block] = entry
                self._parents[block] = parent
                self._state[block] = state
                if parent != ROOT:
                    self._children[parent] += 1
            parent = block

    def remove(self, block: int) -> None:
        """Forget a leaf; does nothing for a block that is not indexed."""
        key = self._keys[block]
        if key is None:
            return
        if self._children[block]:
            raise AssertionError(f"block {block} leaves the index before {self._children[block]} blocks that follow it")
        del self._blocks[key]
        self._keys[block] = None
        self._state[block] = BlockState.UNINDEXED
        self._parents[block] = ROOT
        if key.parent != ROOT:
            self._children[key.parent] -= 1

    def forget(self, blocks: BlockIds) -> list[int]:
        """Remove `blocks` (in sequence order) and all that follow them, whoever holds them; what was removed.

        For content that cannot be trusted. Takes time in the number of blocks there are.
        """
        doomed = [block for block in map(int, blocks) if self._keys[block] is not None]
        level = np.array(doomed, np.int64)
        while len(level):
            following = np.isin(self._parents, level)
            following[doomed] = False
            level = np.flatnonzero(following)
            doomed += level.tolist()
        for block in reversed(doomed):
            self.remove(block)
        return doomed

    def mark(self, blocks: npt.NDArray[np.int32], before: BlockState, after: BlockState) -> None:
        """Move those of `blocks` that are in state `before` to `after`."""
        self._state[blocks[self._state[blocks] == before]] = after

    def in_state(self, blocks: BlockIds, state: BlockState) -> int:
        """How many of `blocks` are in `state`."""
        return int(np.count_nonzero(self._state[np.asarray(blocks, np.int32)] == state))

    def _block_tokens(self, tokens: TokenIds, start: int, end: int) -> list[bytes]:
        size = self.block_size
        data = np.ascontiguousarray(tokens[start * size : end * size], np.int32).tobytes()
        width = size * 4
        return [data[at : at + width] for at in range(0, len(data) - width + 1, width)]
