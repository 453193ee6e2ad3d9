import dataclasses

import pytest

from runner.step_totals import StatsTotals
from tests.output_rows import step_stats


def totals_of(*steps) -> StatsTotals:
    totals = StatsTotals()
    for step in steps:
        totals.add(step)
    return totals


def test_sums_are_those_of_the_steps():
    totals = totals_of(
        step_stats(0, prefill_tokens=30, cached_tokens=10, decode_tokens=0),
        step_stats(1, prefill_tokens=5, recomputed_tokens=5, cached_tokens=0, decode_tokens=6, dropped_tokens=1),
        step_stats(2, evictions=2, preemptions=1, prefill_tokens=0, cached_tokens=0),
    )
    assert totals.steps == 3
    assert totals.input_tokens == 40
    assert totals.hit_rate == 0.25
    assert totals.output_tokens == 7
    assert (totals.evictions, totals.preemptions) == (2, 1)


def test_the_live_share_is_over_the_time_in_which_rows_waited():
    totals = totals_of(
        step_stats(0, waiting=1, blocks_live=10, duration_us=3000),
        step_stats(1, waiting=4, blocks_live=6, duration_us=1000),
        step_stats(2, waiting=0, blocks_live=1, duration_us=4000),
    )
    assert totals.rows_waited
    assert totals.mean_live_fraction == pytest.approx(0.9)
    assert totals.live_fraction == pytest.approx(0.5)


def test_without_waiting_rows_the_live_share_is_over_all_steps():
    totals = totals_of(step_stats(0, waiting=0, blocks_live=4))
    assert not totals.rows_waited
    assert totals.mean_live_fraction == pytest.approx(0.4)


def test_no_steps_have_no_shares():
    totals = totals_of()
    assert (totals.hit_rate, totals.live_fraction, totals.mean_live_fraction) == (0, 0, 0)


def test_the_steps_since_a_copy_are_told_apart():
    totals = totals_of(step_stats(0, blocks_live=10))
    earlier = totals.copy()
    totals.add(step_stats(1, blocks_live=2))
    assert earlier.steps == 1
    assert totals.since(earlier).live_fraction == pytest.approx(0.2)


def test_the_pool_is_told_by_time_with_live_cached_and_free_apart():
    totals = totals_of(
        step_stats(0, waiting=2, blocks_live=8, blocks_cached=2, blocks_free=0, duration_us=3000),
        step_stats(1, waiting=0, blocks_live=2, blocks_cached=6, blocks_free=2, duration_us=1000),
    )
    assert dataclasses.astuple(totals.occupancy) == pytest.approx((0.65, 0.3, 0.05))
    assert totals.waiting_occupancy is not None
    assert dataclasses.astuple(totals.waiting_occupancy) == pytest.approx((0.8, 0.2, 0.0))
    assert totals_of(step_stats(0, waiting=0)).waiting_occupancy is None


def test_hits_of_the_filling_step_are_a_part_of_the_hits():
    totals = totals_of(step_stats(0, prefill_tokens=20, cached_tokens=60, inflight_hit_tokens=40))
    assert (totals.hit_rate, totals.inflight_hit_rate) == (0.75, 0.5)


def test_shared_blocks_and_slack_are_means_over_time():
    totals = totals_of(
        step_stats(0, blocks_live=5, shared_blocks=15, slack_tokens=8, duration_us=1000),
        step_stats(1, blocks_live=5, shared_blocks=3, slack_tokens=24, duration_us=3000),
    )
    assert totals.shared_blocks == 6
    assert totals.shared_fraction == pytest.approx(6 / 11)
    assert totals.slack_fraction(block_size=16) == pytest.approx(20 / 80)


def test_copied_and_duplicate_blocks_add_up():
    totals = totals_of(step_stats(0, duplicate_blocks=2, copied_blocks=1), step_stats(1, copied_blocks=3))
    assert (totals.duplicate_blocks, totals.copied_blocks) == (2, 4)
