"""Contiguous memory as engines gave it to sequences before paging: taken whole, given back whole, never moved."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol


class ContiguousMemory(Protocol):
    """Slots of one token each, numbered from 0."""

    def take(self, slots: int) -> int | None:
        """The first slot of a run that holds `slots` slots, or None if there is no such run."""
        ...

    def give_back(self, start: int) -> None:
        """Free the run that starts at `start`; a run that was not taken is a KeyError."""
        ...

    def taken(self, slots: int) -> int:
        """How many slots a run of `slots` really takes."""
        ...


class FirstFit:
    """Takes a run from the lowest hole that holds it, to the slot; neighbouring holes become one."""

    def __init__(self, capacity: int) -> None:
        self._starts, self._ends = [0], [capacity]  # of the holes, ascending
        self._runs: dict[int, int] = {}  # start to end

    def take(self, slots: int) -> int | None:
        for hole, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= slots:
                self._starts[hole] = self._runs[start] = start + slots
                if self._starts[hole] == end:
                    del self._starts[hole], self._ends[hole]
                return start
        return None

    def give_back(self, start: int) -> None:
        end = self._runs.pop(start)
        hole = bisect_left(self._starts, start)
        if hole < len(self._starts) and self._starts[hole] == end:
            end = self._ends[hole]
            del self._starts[hole], self._ends[hole]
        if hole and self._ends[hole - 1] == start:
            self._ends[hole - 1] = end
        else:
            self._starts.insert(hole, start)
            self._ends.insert(hole, end)

    def taken(self, slots: int) -> int:
        return slots


class Buddy:
    """Takes runs whose size is a power of two, halving larger ones; two free halves of one run join again.

    A capacity that is no power of two is made of the runs that its binary digits stand for, the largest first.
    D. E. Knuth, The Art of Computer Programming, volume 1, section 2.5.
    """

    def __init__(self, capacity: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(capacity.bit_length())]  # starts, by the size's exponent
        self._runs: dict[int, int] = {}  # start to exponent
        start = 0
        for exponent in reversed(range(len(self._free))):
            if capacity >> exponent & 1:
                self._free[exponent].add(start)
                start += 1 << exponent

    def take(self, slots: int) -> int | None:
        exponent = _exponent(slots)
        found = next((size for size in range(exponent, len(self._free)) if self._free[size]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for size in range(exponent, found):
            self._free[size].add(start + (1 << size))
        self._runs[start] = exponent
        return start

    def give_back(self, start: int) -> None:
        exponent = self._runs.pop(start)
        while (buddy := start ^ 1 << exponent) in self._free[exponent]:
            self._free[exponent].remove(buddy)
            start = min(start, buddy)
            exponent += 1
        self._free[exponent].add(start)

    def taken(self, slots: int) -> int:
        return 1 << _exponent(slots)


def _exponent(slots: int) -> int:
    """Of the smallest power of two that is at least `slots`."""
    return (slots - 1).bit_length()
