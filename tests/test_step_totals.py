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
