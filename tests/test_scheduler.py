"""What each step computes, and who starts, waits and gives way."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import pytest

from engine.block_pool import BlockPool
from engine.prefix_index import PrefixIndex
from engine.scheduler import Limits, Schedule, Scheduler
from engine.sequence import Sequence, SequenceTable
from tests.fake_executor import request

BLOCK_SIZE = 4


class Steps:
    """A scheduler with its parts, and rows of which no two share a token."""

    def __init__(
        self, num_blocks: int, *, max_seqs: int = 8, max_batch_tokens: int = 1000, prefix_cache: bool = True
    ) -> None:
        self.limits = Limits(max_seqs, max_batch_tokens, 1000)
        self.index = PrefixIndex(num_blocks, BLOCK_SIZE)
        self.pool = BlockPool(num_blocks, self.index)
        self.table = SequenceTable(max_seqs, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.table, self.pool, self.index, self.limits, prefix_cache=prefix_cache, admission="greedy"
        )

    def add(self, *prompt_lengths: int) -> None:
        """Rows 0, 1, ... of these lengths, behind those that wait."""
        for row, length in enumerate(prompt_lengths):
            self.scheduler.waiting.append(Sequence(request(row, [1 + row] * length)))

    def schedule(self) -> Schedule:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def finish_step(self, step: Schedule) -> None:
        """Launch the step and give every sampled row a next token."""
        drawing = self.scheduler.launched(step)
        self.table.read(drawing.slots, drawing.positions, np.full(len(drawing.slots), 99, np.int32))

    def run(self, steps: int = 1) -> Schedule:
        for _ in range(steps):
            step = self.schedule()
            self.finish_step(step)
        return step

    def counts(self, step: Schedule) -> list[tuple[int, int]]:
        """(row, tokens) in the order of the step; before it is finished."""
        return [(self.row(slot), count) for slot, count in zip(step.slots.tolist(), step.counts.tolist(), strict=True)]

    def row(self, slot: int) -> int:
        return self.table.sequence(slot).request.row_id

    @property
    def running(self) -> list[int]:
        return [self.row(slot) for slot in self.table.running.tolist()]

    @property
    def waiting(self) -> list[int]:
        return [sequence.request.row_id for sequence in self.scheduler.waiting]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 8, 16), "max_seqs 0 must lie between 1 and max_batch_tokens 8"),
        ((9, 8, 16), "max_seqs 9 must lie between 1 and max_batch_tokens 8"),
        ((1, 1, 1), "max_model_len 1 leaves no room"),
    ],
)
def test_limits_that_no_step_could_keep_are_refused(limits: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(*limits)


def test_the_smallest_limits_are_accepted() -> None:
    assert Limits(8, 8, 2).max_seqs == 8
    assert Limits(1, 1, 2).max_batch_tokens == 1


def test_nothing_to_do_is_no_step() -> None:
    assert Steps(10).scheduler.schedule() is None


def test_a_long_prompt_takes_what_the_budget_leaves_and_single_tokens_come_first() -> None:
    steps = Steps(100, max_batch_tokens=8)
    steps.add(14, 1, 20)
    assert steps.counts(steps.run()) == [(0, 8)]
    mixed = steps.schedule()
    assert steps.counts(mixed) == [(1, 1), (2, 1), (0, 6)]
    steps.finish_step(mixed)
    after = steps.schedule()
    assert steps.counts(after) == [(0, 1), (1, 1), (2, 6)]
    assert (after.prefill_tokens, after.decode_tokens) == (6, 2)


@pytest.mark.parametrize("lengths", [(30, 2, 17, 5), (1, 1, 1, 40), (9, 9, 9, 9)])
def test_no_step_exceeds_the_budget_and_every_decoding_row_is_in_every_step(lengths: Items[int]) -> None:
    steps = Steps(200, max_seqs=4, max_batch_tokens=6)
    steps.add(*lengths)
    for _ in range(20):
        decoding = {
            steps.row(slot)
            for slot in steps.table.running.tolist()
            if steps.table.num_tokens[slot] - steps.table.num_computed[slot] == 1
        }
        step = steps.schedule()
        counts = steps.counts(step)
        assert sum(count for _, count in counts) <= 6
        singles = [count == 1 for _, count in counts]
        assert singles == sorted(singles, reverse=True)
        assert decoding <= {row for row, count in counts if count == 1}
        steps.finish_step(step)
    assert steps.running == [0, 1, 2, 3]


def test_no_more_sequences_run_than_may() -> None:
    steps = Steps(100, max_seqs=2)
    steps.add(3, 3, 3)
    steps.run()
    assert (steps.running, steps.waiting) == ([0, 1], [2])


@pytest.mark.parametrize(("second", "admitted"), [(45, True), (46, False)])
def test_admission_stops_at_the_watermark(second: int, admitted: bool) -> None:
    steps = Steps(100)
    steps.add(50 * BLOCK_SIZE, second * BLOCK_SIZE)
    steps.run()
    assert steps.running == ([0, 1] if admitted else [0])


def test_a_row_that_does_not_fit_yet_is_not_overtaken_by_a_shorter_one() -> None:
    # trap 16
    steps = Steps(20)
    steps.add(10 * BLOCK_SIZE, 15 * BLOCK_SIZE, 1)
    steps.run(2)
    assert (steps.running, steps.waiting) == ([0], [1, 2])
    steps.scheduler.release(int(steps.table.running[0]))
    steps.run()
    assert steps.running == [1, 2]


def test_preemption_takes_the_latest_and_puts_it_first_in_line() -> None:
    # trap 12
    steps = Steps(6, max_seqs=3)
    steps.add(8, 8, 8, 1)
    steps.run()
    assert steps.pool.available == 0
    step = steps.run()
    assert step.preemptions == 1
    assert step.admitted == []
    assert (steps.running, steps.waiting) == ([0, 1], [2, 3])
    assert steps.scheduler.waiting[0].tokens.tolist() == [3] * 8 + [99]


@pytest.mark.parametrize(("prefix_cache", "recomputed"), [(False, 8), (True, 4)])
def test_a_resumed_row_computes_again_only_what_is_not_cached(prefix_cache: bool, recomputed: int) -> None:
    steps = Steps(7, max_seqs=4, prefix_cache=prefix_cache)
    steps.add(8, 8, 8)
    steps.run()
    # One block is free for three ninth tokens: row 2 gives way, and of its two blocks one is taken.
    assert steps.run().preemptions == 1
    steps.scheduler.release(int(steps.table.running[0]))
    step = steps.run()
    assert steps.running == [1, 2]
    assert (step.recomputed_tokens, step.prefill_tokens) == (recomputed, recomputed)
    assert step.cached_tokens == 0, "what a row computed itself is no hit"
    assert step.decode_tokens == 2


def test_an_abandoned_step_leaves_everything_as_it_was() -> None:
    # trap 8
    steps = Steps(20, max_batch_tokens=30)
    steps.add(9)
    steps.run()
    steps.scheduler.release(int(steps.table.running[0]))
    steps.add(9, 9, 40)  # the first one finds the two full blocks of the row before
    before = steps.schedule()
    first = (steps.counts(before), before.cached_tokens, before.prefill_tokens)
    assert first[1] == 8
    steps.scheduler.abandon([], before)
    assert (steps.running, steps.waiting) == ([], [0, 1, 2])
    assert [sequence.cached_tokens for sequence in steps.scheduler.waiting] == [None] * 3
    assert (steps.pool.live, steps.pool.cached, len(steps.index)) == (0, 2, 2)
    again = steps.schedule()
    assert (steps.counts(again), again.cached_tokens, again.prefill_tokens) == first
    assert again.recomputed_tokens == 0


def test_an_abandoned_later_step_keeps_the_tokens_that_earlier_ones_made() -> None:
    steps = Steps(20)
    steps.add(8, 5)
    steps.run(2)
    steps.scheduler.abandon([], steps.schedule())
    assert [sequence.output.tolist() for sequence in steps.scheduler.waiting] == [[99, 99], [99, 99]]
    assert steps.pool.live == 0
    steps.run()
    assert steps.running == [0, 1]


def test_abandoning_launched_steps_takes_back_what_they_promised() -> None:
    # trap 8; invariant 3
    steps = Steps(20, max_batch_tokens=30)
    steps.add(9)
    steps.run()
    steps.add(9, 9)  # rows 0 and 1; the first is that of the row which runs
    read = steps.schedule()
    steps.finish_step(read)
    launched = []
    for _ in range(2):
        step = steps.schedule()
        launched.append((step, steps.scheduler.launched(step)))
    assert len(steps.index) == 4
    steps.scheduler.abandon(launched)
    assert [sequence.output.tolist() for sequence in steps.scheduler.waiting] == [[99, 99], [99], [99]]
    assert (steps.pool.live, len(steps.index)) == (0, 4), "what was read before is still there"
    step = steps.schedule()
    assert step.recomputed_tokens == step.prefill_tokens
    assert steps.running == [0, 0, 1]


def test_a_launched_prompt_that_is_abandoned_leaves_nothing_indexed() -> None:
    # trap 8
    steps = Steps(20)
    steps.add(9)
    step = steps.schedule()
    launched = [(step, steps.scheduler.launched(step))]
    assert len(steps.index) == 2
    steps.scheduler.abandon(launched)
    assert (len(steps.index), steps.pool.live, steps.pool.free) == (0, 0, 20)
    assert steps.run().cached_tokens == 0


def test_a_sequence_that_ended_is_not_scheduled_and_holds_its_blocks_until_it_is_released() -> None:
    # trap 14
    steps = Steps(20)
    steps.add(8, 8)
    steps.run()
    slot = int(steps.table.running[0])
    steps.table.ended[slot] = True
    assert steps.counts(steps.run()) == [(1, 1)]
    assert steps.pool.live == 2 + 3
    steps.scheduler.release(slot)
    assert steps.pool.live == 3


def test_a_finished_row_leaves_its_prompt_to_the_next_of_its_kind() -> None:
    steps = Steps(20)
    steps.add(9)
    steps.run(3)
    sequence = steps.scheduler.release(int(steps.table.running[0]))
    assert sequence.output.tolist() == [99, 99, 99]
    assert (steps.pool.live, steps.pool.cached) == (0, 2)
    steps.add(9)
    step = steps.run()
    assert (step.cached_tokens, step.inflight_hit_tokens, step.prefill_tokens) == (8, 0, 1)


def test_slack_counts_the_unused_places_of_all_held_blocks() -> None:
    steps = Steps(20)
    steps.add(5, 4, 1)
    assert steps.schedule().slack_tokens == 3 + 0 + 3
