"""When a waiting sequence may start."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from engine.occupancy_forecast import Newcomer, OccupancyForecast
from engine.output_lengths import OutputLengths
from engine.sequence import SequenceTable, Slots

AdmissionRule = Literal["planned", "greedy", "reserve"]

WATERMARK_SHARE = 0.05
"""Share of the pool that greedy admission keeps for the growth of running sequences: with ShareGPT-like lengths it
brings recomputation from 43 % down to about 1 % of the tokens and costs 4 points of occupancy (simulated)."""
UPDATE_STEPS = 32
"""Steps after which lengths are judged anew though few rows ended: those that run have grown older."""
UPDATE_SHARE = 1 / 32
"""Rows that end, as a share of those that ended before, after which lengths are judged anew."""


class Admission(Protocol):
    """Decides which sequences start. What it knows of them never includes when they will stop."""

    def begin_step(self) -> None:
        """Sequences may have grown, started and ended since the last decision."""
        ...

    def admits(self, newcomer: Newcomer) -> bool:
        """Whether a sequence may start now. If so, it does, and the next answer reckons with it."""
        ...

    def record_ends(self, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        """Learn from sequences that end in `slots`: where `stopped` of their own accord, else at their limit."""
        ...


def make_admission(rule: AdmissionRule, table: SequenceTable, num_blocks: int) -> Admission:
    """Admission by `rule` to a pool of `num_blocks` blocks, beside what runs in `table`."""
    if rule == "greedy":
        return GreedyAdmission(table, num_blocks)
    if rule == "reserve":
        return ReservingAdmission(table, num_blocks)
    return PlannedAdmission(table, num_blocks)


class GreedyAdmission:
    """Admission under a watermark.

    A sequence starts only when blocks for all its known tokens are there, so a prefill once begun is
    never short of blocks, and only if a share of the pool stays available after it. Alone, it may take
    the whole pool.
    """

    def __init__(self, table: SequenceTable, num_blocks: int) -> None:
        self._table = table
        self._watermark = int(num_blocks * WATERMARK_SHARE)

    def begin_step(self) -> None:
        return

    def admits(self, newcomer: Newcomer) -> bool:
        return newcomer.needed + (self._watermark if len(self._table) else 0) <= newcomer.available

    def record_ends(self, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        return


class ReservingAdmission:
    """Counts the blocks of a sequence's greatest length when it starts, so that none has to be preempted.

    Only the samples of a prompt that is alone in the pool may be too many for it.
    """

    def __init__(self, table: SequenceTable, num_blocks: int) -> None:
        self._table = table
        self._num_blocks = num_blocks
        self._reserved: int | None = None

    def begin_step(self) -> None:
        self._reserved = None

    def admits(self, newcomer: Newcomer) -> bool:
        if self._reserved is None:
            self._reserved = self._reserved_by_running()
        size = self._table.block_size
        most = -(-(newcomer.limit - 1) // size)  # the last token takes no slot
        most_of_sample = most - newcomer.prompt // size
        reserved = self._reserved + most - newcomer.shared + (newcomer.samples - 1) * most_of_sample
        if newcomer.needed > newcomer.available or (len(self._table) and reserved > self._num_blocks):
            return False
        self._reserved = reserved
        return True

    def record_ends(self, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        return

    def _reserved_by_running(self) -> int:
        table, size = self._table, self._table.block_size
        slots, shared = table.prefix_order.slots, table.prefix_order.shared
        most = -(-(table.token_limit[slots] - 1) // size)
        samples = table.parting[slots] * (most - table.prompt_tokens[slots] // size)
        return int((most - shared + samples).sum())


class PlannedAdmission:
    """Foresees the blocks in use over the coming steps, and admits whatever keeps their peak within the pool.

    How long sequences go on is judged by those that ended, see `OutputLengths`; as long as none has, all are
    expected to reach their limits. Alone, a sequence may take the whole pool.
    """

    def __init__(self, table: SequenceTable, num_blocks: int) -> None:
        self._table = table
        self._num_blocks = num_blocks
        self._lengths = OutputLengths()
        self._forecast: OccupancyForecast | None = None
        self._steps_since_update = 0
        self._ends_at_update = 0

    def begin_step(self) -> None:
        self._forecast = None
        self._steps_since_update += 1

    def admits(self, newcomer: Newcomer) -> bool:
        if newcomer.needed > newcomer.available:
            return False
        if self._forecast is None:
            self._update_lengths(newcomer)
            self._forecast = OccupancyForecast(self._table, self._lengths, self._num_blocks, newcomer)
        return self._forecast.take(newcomer, alone=not len(self._table))

    def record_ends(self, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        table = self._table
        self._lengths.record(table.num_tokens[slots] - table.prompt_tokens[slots], stopped, table.group[slots])

    def _update_lengths(self, newcomer: Newcomer) -> None:
        """Judge lengths anew if enough has happened, or the last judgement does not reach far enough."""
        table, ends = self._table, self._lengths.num_ended
        slots = table.running
        most = np.append(table.token_limit[slots] - table.prompt_tokens[slots], newcomer.limit - newcomer.prompt)
        longest = int(most.max())
        due = self._steps_since_update >= UPDATE_STEPS or ends > self._ends_at_update * (1 + UPDATE_SHARE)
        if (due and ends) or longest >= self._lengths.survival.shape[1]:
            ages = table.num_tokens[slots] - table.prompt_tokens[slots]
            self._lengths.update(ages, table.group[slots], longest)
            self._steps_since_update, self._ends_at_update = 0, ends
