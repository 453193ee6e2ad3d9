"""How many blocks will be in use over the coming steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.output_lengths import Counts, OutputLengths
from engine.sequence import SequenceTable

Figures = npt.NDArray[np.float64]

DEVIATIONS = 1.75
"""Standard deviations above the expected use that must still fit: with 1, long outputs are preempted more than once in
a hundred rows; with 2, occupancy falls by another point (`benchmarks.simulate_admission`)."""
SPARE_SHARE, MOST_SPARE_SHARE = 0.01, 0.025
"""Shares of the pool. The forecast leaves the first alone for what it misjudges, and beside it the blocks of one
sequence, which may end a little after the time that was looked at; both together never more than the second."""
FEWEST_TRIED = 32
"""So many sequences are tried at once before any has ended, however far their limits lie."""
MOST_TIMES, MOST_CELLS = 128, 24_576
"""Times of a forecast, and sequences times times: 1,024 sequences are looked at 24 times."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Its multiples, less their whole parts, spread evenly over 0 to 1 however many are taken."""
NEWCOMER_TIMES = 12
"""Times at which a newcomer is as likely to end as between any two others; the rest are those of running sequences."""


class Newcomer(NamedTuple):
    """A waiting sequence that would start now, in tokens and in blocks.

    It knows `tokens`, of which `prompt` are its prompt, and ends by length at `limit`. It takes `shared` blocks that
    running sequences hold, and `needed` of the `available` ones. It stands for `samples` sequences, which have only
    the full blocks of the prompt in common. `group` says whose lengths it is likely to have (`Request.group`).
    """

    tokens: int
    prompt: int
    limit: int
    shared: int
    needed: int
    available: int
    samples: int
    group: int


class _Rows(NamedTuple):
    """Sequences as the forecast sees them; arrays of [rows].

    After t more steps, one that has made `ages` tokens until now holds `blocks + rate * t` that no other one holds,
    unless it has ended, which it has for certain after `left` steps. `curves` is its row of `OutputLengths.survival`.
    """

    ages: Counts
    left: Counts
    curves: Counts
    blocks: Figures
    rate: Figures

    def take(self, rows: Counts) -> _Rows:
        """Some of the rows, by their indices."""
        return _Rows(self.ages[rows], self.left[rows], self.curves[rows], self.blocks[rows], self.rate[rows])


class OccupancyForecast:
    """The expected number of blocks in use at some coming times, and its variance, if nothing else starts.

    A sequence that runs draws a token in every step. Its blocks are in use for as long as it is expected to run;
    those it shares with others count once, and until the last of these is expected to have ended. With many
    sequences the sum varies far less than its parts, so that it is bounded by its deviation and not by their limits.
    """

    def __init__(self, table: SequenceTable, lengths: OutputLengths, num_blocks: int, first: Newcomer) -> None:
        self._block_size = table.block_size
        self._num_blocks = num_blocks
        self._lengths = lengths
        running = self._running(table)
        self._times = self._choose_times(running, self._newcomer(first))
        alive = self._alive(running)
        doubt = alive - alive * alive
        self.mean = running.blocks @ alive + (running.rate @ alive) * self._times
        self.variance = (
            np.square(running.blocks) @ doubt
            + 2 * self._times * ((running.blocks * running.rate) @ doubt)
            + np.square(self._times) * (np.square(running.rate) @ doubt)
        )
        self._add_shared(table, alive)
        peak = int(self.mean.argmax())
        one = self.mean[peak] / max(1.0, float(alive[:, peak].sum()))
        self._most = num_blocks - min(SPARE_SHARE * num_blocks + one, MOST_SPARE_SHARE * num_blocks)

    def take(self, newcomer: Newcomer, *, alone: bool) -> bool:
        """Add a sequence, if the pool will hold it, too, or it is `alone` in it; whether it was added."""
        row = self._newcomer(newcomer)
        alive = self._alive(row)[0]
        blocks = row.blocks[0] + row.rate[0] * self._times
        mean = self.mean + alive * blocks
        variance = self.variance + (alive - alive * alive) * np.square(blocks)
        peak = float((mean + DEVIATIONS * np.sqrt(variance)).max())
        if peak > self._most and not alone:
            return False
        self.mean, self.variance = mean, variance
        return True

    def _running(self, table: SequenceTable) -> _Rows:
        slots, shared = table.prefix_order.slots, table.prefix_order.shared
        known, prompts = table.num_tokens[slots], table.prompt_tokens[slots]
        left = np.where(table.ended[slots], 0, table.token_limit[slots] - known)
        elsewhere = np.maximum(shared, np.append(shared[1:], 0)) if len(shared) else shared
        curves = self._lengths.rows_of(table.group[slots])
        return self._rows(known, prompts, left, elsewhere, table.parting[slots], curves)

    def _newcomer(self, newcomer: Newcomer) -> _Rows:
        one = np.ones(1, np.int64)
        curves = self._lengths.rows_of(newcomer.group * one)
        known, left = newcomer.tokens * one, (newcomer.limit - newcomer.tokens) * one
        shared, parting = newcomer.shared * one, (newcomer.samples - 1) * one
        return self._rows(known, newcomer.prompt * one, left, shared, parting, curves)

    def _rows(
        self, known: Counts, prompts: Counts, left: Counts, elsewhere: Counts, parting: Counts, curves: Counts
    ) -> _Rows:
        if not self._lengths.num_ended:
            # As much again as it has, or its part of the pool.
            part = self._num_blocks * self._block_size // FEWEST_TRIED
            left = np.minimum(left, np.maximum(part - known, known))
        size = self._block_size
        blocks = known / size + (size - 1) / (2 * size)  # half of the last block is empty on average
        blocks = blocks - elsewhere + parting * (blocks - prompts // size)
        return _Rows(known - prompts, left, curves, blocks, (1 + parting) / size)

    def _choose_times(self, running: _Rows, first: _Rows) -> Figures:
        """Now, and when ends are likely: use has its peaks right before them."""
        most = max(1, min(MOST_TIMES, MOST_CELLS // max(1, len(running.ages))) - NEWCOMER_TIMES - 2)
        sample = running.take(np.arange(0, len(running.ages), 1 + len(running.ages) // MOST_TIMES))
        chances = np.asarray(np.arange(1, len(sample.ages) + 1) * GOLDEN_RATIO % 1, np.float64)
        ends = np.sort(self._likely_left(sample, chances))
        chosen = ends[np.linspace(0, len(ends) - 1, min(most, len(ends))).astype(np.int64)]
        again = first.take(np.zeros(NEWCOMER_TIMES, np.int64))
        own = self._likely_left(again, (np.arange(NEWCOMER_TIMES) + 0.5) / NEWCOMER_TIMES)
        return np.sort(np.concatenate((np.zeros(1), chosen, own, first.left - 1.0)))

    def _likely_left(self, rows: _Rows, chances: Figures) -> Figures:
        """The most steps that each row outlives with more than its one of `chances`; float64 [rows]."""
        survival = self._lengths.survival
        ends = np.empty(len(rows.ages))
        for curve in np.unique(rows.curves).tolist():
            mine = rows.curves == curve
            ages = rows.ages[mine]
            outlived = np.searchsorted(-survival[curve], -chances[mine] * survival[curve, ages]) - 1
            ends[mine] = outlived - ages
        return np.clip(ends, 0, np.maximum(rows.left - 1, 0))

    def _alive(self, rows: _Rows) -> Figures:
        """The chance that each row still runs at each time; float64 [rows, times]."""
        survival = self._lengths.survival
        times, width = self._times.astype(np.int64), survival.shape[1]
        places = rows.ages[:, None] + times
        if len(survival) > 1:
            np.minimum(places, width - 1, out=places)
            places += (rows.curves * width)[:, None]
        alive = survival.ravel().take(places, mode="clip")
        alive *= (1 / survival[rows.curves, rows.ages])[:, None]
        alive[times.astype(np.int32) >= rows.left.astype(np.int32)[:, None]] = 0
        return alive

    def _add_shared(self, table: SequenceTable, alive: Figures) -> None:
        """Blocks of several sequences: neighbours that share anything keep all of it until the last has ended."""
        shared = table.prefix_order.shared
        if not shared.any():
            return
        starts = np.flatnonzero(shared == 0)
        blocks = np.add.reduceat(np.maximum(np.append(shared[1:], 0) - shared, 0), starts)
        self.mean += blocks @ np.minimum(np.add.reduceat(alive, starts, axis=0), 1)
