"""Which running sequence gives way when blocks are short."""

from __future__ import annotations

import numpy as np

from engine.sequence import SequenceTable

MOST_PREEMPTIONS = 2
"""A sequence that gave way so often is spared as long as there are others."""
GROWTH = 0.1
"""Blocks for each running sequence that giving way must bring beside those that are short: the growth of two steps
with blocks of 16. With less, sequences give way one after another; with more, larger ones are computed again."""


def choose_victim(table: SequenceTable, short: int) -> int:
    """The slot whose sequence wastes least if it gives way to those that are `short` blocks.

    The blocks that it alone holds are regained, and their tokens may have to be computed again. Of the sequences that
    hold enough of them the one with fewest gives way, if there are none the one with most, and of equal ones the
    last that started. The one that started first never does, so that there is progress, unless it runs alone.
    """
    running = table.running
    if len(running) == 1:
        return int(running[0])
    others = running[1:]
    spared = table.preempted[others] >= MOST_PREEMPTIONS
    if spared.all():
        return int(others[-1])
    candidates = others[~spared]
    regained = table.own_blocks()[candidates]
    enough = regained >= short + int(GROWTH * len(running))
    waste = np.where(enough, regained, np.iinfo(np.int64).max) if enough.any() else -regained
    return int(candidates[len(waste) - 1 - waste[::-1].argmin()])
