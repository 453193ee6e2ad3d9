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
NOT_ON_PATH = -1


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
    down and removed leaves first. The path walked last is remembered: jobs run in order of prefix, so most
    of what is asked for next is compared with it at once instead of block by block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents: npt.NDArray[np.int32] = np.full(num_blocks, ROOT, np.int32)
        self._children: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._state: npt.NDArray[np.int8] = np.zeros(num_blocks, np.int8)
        self._path: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._path_tokens: TokenIds = np.empty(0, np.int32)
        self._path_place: npt.NDArray[np.int32] = np.full(num_blocks, NOT_ON_PATH, np.int32)

    def __len__(self) -> int:
        return len(self._blocks)

    def state(self, block: int) -> BlockState:
        """What the index promises about `block`."""
        return BlockState(int(self._state[block]))

    def states(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        """What the index promises about each of `blocks`, as numbers of BlockState."""
        return self._state[blocks]

    def is_leaf(self, block: int) -> bool:
        """Whether no indexed block continues `block`."""
        return not self._children[block]

    def are_leaves(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of `blocks` no indexed block continues."""
        return self._children[blocks] == 0

    def before(self, blocks: BlockIds) -> int:
        """The indexed block before the first of `blocks` (in sequence order) that is indexed, or ROOT."""
        return next((key.parent for block in map(int, blocks) if (key := self._keys[block]) is not None), ROOT)

    def parent(self, block: int) -> int:
        """The indexed block before `block`, or ROOT. Raises KeyError if `block` is not indexed."""
        key = self._keys[block]
        if key is None:
            raise KeyError(block)
        return key.parent

    def match(self, tokens: TokenIds, max_blocks: int) -> list[int]:
        """The indexed blocks that hold the first tokens of a sequence, in order, at most `max_blocks`."""
        shared = min(self._shared_with_path(tokens), max_blocks)
        found: list[int] = self._path[:shared].tolist()
        parent = found[-1] if found else ROOT
        for key in self._block_tokens(tokens, shared, max_blocks):
            block = self._blocks.get(BlockKey(parent, key))
            if block is None:
                break
            found.append(block)
            parent = block
        if len(found) > shared:
            self._remember(tokens, found)
        return found

    def insert(self, tokens: TokenIds, blocks: BlockIds, start: int, end: int, state: BlockState) -> None:
        """Index blocks `start` to `end` of a sequence, whose earlier blocks are indexed.

        Stops at the first block whose content another block already stands for: what follows could
        not be a child of a block that this sequence does not hold.
        """
        parent = int(blocks[start - 1]) if start else ROOT
        reached = start
        for position, key in enumerate(self._block_tokens(tokens, start, end), start):
            block = int(blocks[position])
            entry = BlockKey(parent, key)
            holder = self._blocks.setdefault(entry, block)
            if holder != block:
                break
            if self._keys[block] is None:
                self._keys[block] = entry
                self._parents[block] = parent
                self._state[block] = state
                if parent != ROOT:
                    self._children[parent] += 1
            parent, reached = block, position + 1
        self._remember(tokens, blocks[:reached])

    def remove(self, block: int) -> None:
        """Forget a leaf; does nothing for a block that is not indexed."""
        key = self._keys[block]
        if key is None:
            return
        if self._children[block]:
            raise AssertionError(f"block {block} leaves the index before {self._children[block]} blocks that follow it")
        if (place := int(self._path_place[block])) != NOT_ON_PATH:
            self._path_place[self._path[place:]] = NOT_ON_PATH
            self._path, self._path_tokens = self._path[:place], self._path_tokens[: place * self.block_size]
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

    def _shared_with_path(self, tokens: TokenIds) -> int:
        """How many full blocks of `tokens` the remembered path holds."""
        length = min(len(tokens), len(self._path_tokens))
        differing = np.flatnonzero(tokens[:length] != self._path_tokens[:length])
        return int(differing[0] if len(differing) else length) // self.block_size

    def _remember(self, tokens: TokenIds, path: BlockIds) -> None:
        """Keep `path`, indexed blocks that hold the first of `tokens` in order, for the next question."""
        self._path_place[self._path] = NOT_ON_PATH
        self._path = np.array(path, np.int32)
        self._path_tokens = np.array(tokens[: len(path) * self.block_size], np.int32)
        self._path_place[self._path] = np.arange(len(path))

    def _block_tokens(self, tokens: TokenIds, start: int, end: int) -> list[bytes]:
        size = self.block_size
        data = np.ascontiguousarray(tokens[start * size : end * size], np.int32).tobytes()
        width = size * 4
        return [data[at : at + width] for at in range(0, len(data) - width + 1, width)]
