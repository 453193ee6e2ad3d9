"""How long outputs are expected to get."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine.output_lengths import MOST_GROUPS, NO_GROUP, Counts, OutputLengths

NOTHING: Counts = np.empty(0, np.int64)
LONGEST = 500


def ended(
    lengths: list[int] | Counts, *, stopped: bool = True, group: int = NO_GROUP
) -> tuple[Counts, npt.NDArray[np.bool_], Counts]:
    return np.asarray(lengths, np.int64), np.full(len(lengths), stopped), np.full(len(lengths), group)


def judged(lengths: OutputLengths, ages: list[int] | None = None, groups: list[int] | None = None) -> None:
    ages = ages or []
    lengths.update(np.array(ages, np.int64), np.array(groups or [NO_GROUP] * len(ages), np.int64), LONGEST)


def test_as_long_as_nothing_has_ended_everything_goes_on() -> None:
    lengths = OutputLengths()
    judged(lengths, [3, 200])
    assert np.all(lengths.survival == 1)
    assert lengths.survival.shape[1] > LONGEST


def test_the_share_that_outlives_an_age_is_the_share_of_longer_rows() -> None:
    lengths = OutputLengths()
    drawn = np.random.default_rng(0).integers(1, 301, 20_000)
    lengths.record(*ended(drawn))
    judged(lengths)
    curve = lengths.survival[0]
    for age in (0, 10, 150, 250):
        assert curve[age] == pytest.approx(np.mean(drawn > age), abs=0.01)


def test_equal_lengths_are_known_to_the_token() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([120] * 99))
    judged(lengths)
    assert lengths.survival[0, 119] == 1
    assert lengths.survival[0, 120] == pytest.approx(0.01)


def test_rows_that_still_run_keep_early_ends_from_passing_for_typical() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([20] * 10))
    judged(lengths, [30] * 90)
    assert lengths.survival[0, 20] == pytest.approx(0.9, abs=0.01)


def test_rows_that_ended_at_their_limit_would_have_gone_on() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([50] * 40, stopped=False))
    judged(lengths)
    assert np.all(lengths.survival[0] == 1)
    assert lengths.num_ended == 40


def test_ages_that_no_row_has_reached_are_outlived_at_the_rate_before_but_not_by_few() -> None:
    steady, early = OutputLengths(), OutputLengths()
    steady.record(*ended(list(range(1, 101))))
    judged(steady, [100] * 400)
    rate = -np.log(steady.survival[0, 99] / steady.survival[0, 50]) / 49
    beyond = -np.log(steady.survival[0, 200] / steady.survival[0, 100]) / 100
    assert 0.3 * rate < beyond < rate
    early.record(*ended([48, 49, 50, 50] * 25))
    judged(early, [51] * 20)
    assert early.survival[0, 50] == pytest.approx(1 / 6, abs=0.01)
    assert early.survival[0, 300] > 0.6 * early.survival[0, 50], "that most end at once says little about the others"


def test_one_end_says_nothing_about_later_ages() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([40]))
    judged(lengths, [41] * 9)
    assert lengths.survival[0, LONGEST] == lengths.survival[0, 40]


def test_a_group_that_differs_is_judged_by_its_own_rows_and_a_new_one_by_those_of_the_job() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([10] * 100, group=7))
    lengths.record(*ended([300] * 100, group=5))
    judged(lengths)
    short, long, unknown = lengths.rows_of(np.array([7, 5, 99]))
    assert lengths.survival[short, 10] < 0.05
    assert lengths.survival[long, 10] > 0.9
    assert unknown == 0
    assert lengths.survival[0, 10] == pytest.approx(0.5, abs=0.01)
    assert lengths.rows_of(np.array([NO_GROUP])).tolist() == [0]


def test_running_rows_of_a_group_count_for_it_before_any_more_end() -> None:
    lengths = OutputLengths()
    lengths.record(*ended([10] * 400, group=1))
    lengths.record(*ended([10], group=2))
    judged(lengths, [200] * 60, [2] * 60)
    (row,) = lengths.rows_of(np.array([2]))
    assert lengths.survival[row, 100] > 0.85


def test_only_so_many_groups_are_kept_and_the_oldest_goes() -> None:
    lengths = OutputLengths()
    for group in range(MOST_GROUPS + 1):
        lengths.record(*ended([10], group=group))
    judged(lengths)
    rows = lengths.rows_of(np.arange(MOST_GROUPS + 1))
    assert rows[0] == 0
    assert sorted(rows[1:].tolist()) == list(range(1, MOST_GROUPS + 1))
    assert lengths.survival.shape[0] == 1 + MOST_GROUPS


def test_no_age_is_impossible_however_many_ended_before_it() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.record(*ended(np.arange(1, 101)))
    judged(lengths)
    assert np.all(lengths.survival > 0)
    assert np.all(np.diff(lengths.survival) <= 0)
