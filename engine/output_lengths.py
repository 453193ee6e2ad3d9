"""How long outputs get, judged by the rows that ended and by those that run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

NO_GROUP = -1
"""Of rows that are only known to be of this job."""
MOST_GROUPS = 16
"""Groups with counts of their own; the one whose last row ended longest ago makes room for another."""
GROUP_WEIGHT = 4.0
"""Rows of a group that its own lengths count as much from as those of the job: where groups differ clearly, a
dozen rows are enough to say so."""
FEWEST_AT_RISK = 4
"""Ages that fewer rows reached say nothing on their own."""
TAIL_RATE = 0.5
"""Beyond the ages seen, at most this part of the rate of lengths that are spread evenly up to the limit."""
LEAST_SURVIVAL = 1e-12
"""Keeps the chance to outlive an age defined after any age."""


@dataclass(slots=True)
class _Ended:
    """Rows that ended, by the number of tokens that they made; int64 [longest + 1] each."""

    by_stop: Counts
    in_all: Counts

    @classmethod
    def none(cls, width: int) -> _Ended:
        return cls(np.zeros(width, np.int64), np.zeros(width, np.int64))

    def add(self, lengths: Counts, stopped: npt.NDArray[np.bool_]) -> None:
        np.add.at(self.by_stop, lengths[stopped], 1)
        np.add.at(self.in_all, lengths, 1)

    def widen(self, width: int) -> None:
        missing = (0, width - len(self.in_all))
        self.by_stop, self.in_all = np.pad(self.by_stop, missing), np.pad(self.in_all, missing)


class OutputLengths:
    """The chance that a row is still running after so many tokens, for the job and for groups of its rows.

    The product-limit estimate (Kaplan and Meier 1958, doi:10.1080/01621459.1958.10501452): rows that run, and those
    that ended at their limit, count as rows of which only a least length is known. Without that the short ones, which
    end first, would pass for typical at the start of a job. An age at which nobody ended is survived for certain, and
    where nobody came the rate of the ages before goes on. A group is judged by its own rows as far as there are any,
    and otherwise by those of the job.
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self._job = _Ended.none(1)
        self._groups: dict[int, _Ended] = {}  # the one that was heard of last comes last
        self._group_ids: Counts = np.empty(0, np.int64)
        self._survival: npt.NDArray[np.float64] = np.ones((1, 1))

    @property
    def survival(self) -> npt.NDArray[np.float64]:
        """Share of the rows that draw more than `age` tokens, float64 [1 + groups, longest age + 1]; above 0.

        The first row is the job's. It is that of the last `update`.
        """
        return self._survival

    def rows_of(self, groups: Counts) -> Counts:
        """The row of `survival` that speaks for each of `groups` (int64, `NO_GROUP` for none)."""
        if not len(self._group_ids):
            return np.zeros(len(groups), np.int64)
        place = np.minimum(np.searchsorted(self._group_ids, groups), len(self._group_ids) - 1)
        return np.where(self._group_ids[place] == groups, place + 1, 0)

    def record(self, lengths: Counts, stopped: npt.NDArray[np.bool_], groups: Counts) -> None:
        """Count rows that ended after `lengths` tokens: where `stopped` of their own accord, else at their limit."""
        self._widen(int(lengths.max(initial=0)) + 1)
        self._job.add(lengths, stopped)
        self.num_ended += len(lengths)
        for group in np.unique(groups[groups != NO_GROUP]).tolist():
            ended = self._groups.pop(group, None) or _Ended.none(len(self._job.in_all))
            if len(self._groups) == MOST_GROUPS:
                del self._groups[next(iter(self._groups))]
            self._groups[group] = ended
            mine = groups == group
            ended.add(lengths[mine], stopped[mine])

    def update(self, ages: Counts, groups: Counts, longest: int) -> None:
        """Judge anew up to the age of `longest` tokens, given what runs: tokens drawn so far, and group of each."""
        self._widen(max(longest, int(ages.max(initial=0))) + 1)
        width = len(self._job.in_all)
        at_risk, stops = _at_risk(self._job, ages), _stops(self._job)
        hazard = stops / (at_risk + 1)  # one more that never ends: the last row to be seen is not sure to end there
        _extrapolate(hazard, stops, at_risk, longest)
        self._group_ids = np.array(sorted(self._groups), np.int64)
        hazards = [hazard]
        for group in self._group_ids.tolist():
            ended = self._groups[group]
            own_at_risk = _at_risk(ended, ages[groups == group])
            hazards.append((_stops(ended) + GROUP_WEIGHT * hazard) / (own_at_risk + GROUP_WEIGHT))
        survival = np.ones((len(hazards), width))
        np.cumprod(1 - np.stack(hazards)[:, :-1], axis=1, out=survival[:, 1:])
        self._survival = np.maximum(survival, LEAST_SURVIVAL)

    def _widen(self, width: int) -> None:
        """Make room for ages below `width`, at least doubling so that it stays rare."""
        before = len(self._job.in_all)
        if width > before:
            for ended in (self._job, *self._groups.values()):
                ended.widen(max(width, 2 * before))


def _at_risk(ended: _Ended, ages: Counts) -> Counts:
    """How many rows drew the token after their `age`-th, which might have been the last; int64 [width]."""
    reached = ended.in_all + np.bincount(ages, minlength=len(ended.in_all))
    return reached.sum() - np.cumsum(reached)


def _stops(ended: _Ended) -> Counts:
    """How many rows ended of their own accord with the token after their `age`-th; int64 [width]."""
    return np.append(ended.by_stop[1:], 0)


def _extrapolate(hazard: npt.NDArray[np.float64], stops: Counts, at_risk: Counts, longest: int) -> None:
    """Fill in the ages that too few rows reached.

    The rate of the older half of the ages seen goes on, less what chance explains, but at most half that of lengths
    spread evenly up to `longest`: that most rows end early says little about the others, which fill a pool for long.
    """
    seen = int(np.count_nonzero(at_risk >= FEWEST_AT_RISK))
    recent = slice(seen // 2, seen)
    ends = float(stops[recent].sum())
    rate = max(ends - math.sqrt(ends), 0) / max(1, int(at_risk[recent].sum()))
    ages = np.arange(seen, len(hazard))
    hazard[seen:] = np.minimum(rate, TAIL_RATE / np.maximum(longest - ages, 1))
