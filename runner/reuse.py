"""When the K/V of a window's prompts are needed next: the plan that eviction goes by."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.request import Reuse

Counts = npt.NDArray[np.int64]
Ordinals = npt.NDArray[np.int64]
Uses = tuple[Reuse, ...]

ROOT = ROOT_LEVEL = 0
NEVER = int(np.iinfo(np.int64).max)


def plan_reuse(lengths: Counts, shared: Counts, ordinals: Ordinals, block_size: int) -> list[Uses]:
    """For each prompt in the order in which they run: `Request.reuse`, in whole blocks.

    The prompts are described in prefix order: `lengths` int64 [prompts] in tokens, `shared` int64 [prompts] the
    leading tokens that each has in common with the one before (0 for the first), and `ordinals` int64 [prompts]
    their places in the order in which they run. What all of them share is needed again by the first prompt after
    them: the next window of the same job begins alike.

    Takes time in the number of prompts for each branching on the way from a prompt to the root of their trie,
    in array operations but for one pass, and about 300 bytes a prompt while it runs.
    """
    found = _Found(len(lengths))
    tree = _prefix_tree(shared // block_size)
    ranks = np.empty(len(lengths), np.int64)
    ranks[ordinals] = np.arange(len(lengths))
    lengths, node = lengths[ranks], tree.leaf_node[ranks]
    takes = (lengths - 1) // block_size  # blocks that a prompt can find: its last token is always computed
    level = tree.level[node]
    members = nodes = np.empty(0, np.int64)
    for deepest in range(int(tree.level.max()), ROOT_LEVEL, -1):
        joining = np.flatnonzero(level == deepest)
        members = np.concatenate((members, joining))
        nodes = np.concatenate((tree.parent[nodes], node[joining]))
        by_node = np.lexsort((members, nodes))
        members, nodes = members[by_node], nodes[by_node]
        depth, above = tree.depth[nodes], tree.depth[tree.parent[nodes]]
        takes_all = takes[members] >= depth
        found.add(members, depth, _next_in_node(nodes, members, takes_all))
        if not takes_all.all():  # a prompt that ends with the node's last block takes one block less
            others = _next_in_node(nodes, members, np.ones(len(members), np.bool_))
            found.add(members, depth - 1, np.where(depth - 1 > above, others, NEVER))
    if len(lengths) > 1 and (common := int(shared[1:].min()) // block_size):
        found.add_last(common, len(lengths))
    return found.uses(block_size)


class _Found:
    """Later uses of each prompt as they are found, from the most leading blocks to the fewest."""

    def __init__(self, prompts: int) -> None:
        self._soonest = np.full(prompts, NEVER, np.int64)
        self._most_blocks = np.zeros(prompts, np.int64)
        self._members: list[Ordinals] = [np.empty(0, np.int64)]
        self._blocks: list[Counts] = [np.empty(0, np.int64)]
        self._uses: list[Ordinals] = [np.empty(0, np.int64)]

    def add(self, members: Ordinals, blocks: Counts, uses: Ordinals) -> None:
        """The first `blocks` of each of `members` are needed at `uses`: news if no more of it is by then."""
        sooner = uses < self._soonest[members]
        members, blocks, uses = members[sooner], blocks[sooner], uses[sooner]
        self._soonest[members] = uses
        self._most_blocks[members] = np.maximum(self._most_blocks[members], blocks)
        self._members.append(members)
        self._blocks.append(blocks)
        self._uses.append(uses)

    def add_last(self, blocks: int, use: int) -> None:
        """The first `blocks` of all prompts are needed at `use`, after all other uses."""
        members = np.flatnonzero(self._most_blocks < blocks)
        self._members.insert(0, members)
        self._blocks.insert(0, np.full(len(members), blocks, np.int64))
        self._uses.insert(0, np.full(len(members), use, np.int64))

    def uses(self, block_size: int) -> list[Uses]:
        """Those of each prompt, fewest blocks first; equal ones, of which there are many, are one object."""
        members = np.concatenate(self._members[::-1])
        order = np.argsort(members, kind="stable")
        members = members[order]
        tokens = np.concatenate(self._blocks[::-1])[order] * block_size
        distances = np.concatenate(self._uses[::-1])[order] - members
        pairs = list(zip(tokens.tolist(), distances.tolist(), strict=True))
        starts = np.searchsorted(members, np.arange(len(self._soonest) + 1))
        known: dict[tuple[tuple[int, int], ...], Uses] = {}
        uses: list[Uses] = []
        for begin, end in pairwise(starts.tolist()):
            steps = tuple(pairs[begin:end])
            if (mine := known.get(steps)) is None:
                mine = known[steps] = tuple(map(Reuse._make, steps))
            uses.append(mine)
        return uses


@dataclass(frozen=True, slots=True)
class _PrefixTree:
    """The branchings of a trie of blocks; node 0 is its root.

    `depth` int64 [nodes] in blocks, `level` int64 [nodes] in nodes, `parent` int64 [nodes], `leaf_node` int64
    [prompts]: the deepest node that a prompt has in common with another, in prefix order.
    """

    depth: Counts
    level: Counts
    parent: npt.NDArray[np.int64]
    leaf_node: npt.NDArray[np.int64]


def _prefix_tree(shared: Counts) -> _PrefixTree:
    """The tree of prompts that each have `shared` blocks in common with the one before: intervals of that array."""
    depth, parent = [0], [ROOT]
    leaf_node: list[int] = []
    path = [ROOT]  # nodes that the last prompt is under, from the root down
    for blocks in shared.tolist():
        left = ROOT
        while depth[path[-1]] > blocks:
            left = path.pop()
        if depth[path[-1]] < blocks:
            node = len(depth)
            depth.append(blocks)
            parent.append(path[-1])
            if left == ROOT:
                leaf_node[-1] = node  # the last prompt is under it, too
            else:
                parent[left] = node
            path.append(node)
        leaf_node.append(path[-1])
    level = [ROOT_LEVEL] * len(depth)
    for node in sorted(range(1, len(depth)), key=depth.__getitem__):
        level[node] = level[parent[node]] + 1
    return _PrefixTree(*(np.array(each, np.int64) for each in (depth, level, parent, leaf_node)))


def _next_in_node(nodes: Counts, members: Ordinals, using: npt.NDArray[np.bool_]) -> Ordinals:
    """For each member the next one of its node that is `using` it, or NEVER; sorted by node, then by ordinal."""
    count = len(members)
    upcoming = np.minimum.accumulate(np.where(using, np.arange(count), count)[::-1])[::-1]
    following = np.append(upcoming[1:], count)
    inside = np.append(nodes, -1)[following] == nodes
    return np.where(inside, np.append(members, NEVER)[following], NEVER)
