from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernel_profile import fullest_steps, summarise


def event(start: float, duration: float, name: str = "gemm", category: str = "kernel") -> dict[str, Any]:
    return {"ts": start, "dur": duration, "name": name, "cat": category}


def test_overlapping_kernels_count_once_as_busy_time() -> None:
    events = [event(20, 10), event(0, 10), event(5, 10, "copy"), event(6, 2, "tiny")]
    profile = summarise(events)
    assert (profile.wall, profile.busy, profile.busy_share) == (30, 25, 25 / 30)
    assert profile.by_name == {"gemm": 20, "copy": 10, "tiny": 2}


def test_a_kernel_that_outlasts_a_later_one_ends_the_wall_time() -> None:
    profile = summarise([event(0, 100), event(10, 5)])
    assert (profile.wall, profile.busy) == (100, 100)


def test_only_kernels_count() -> None:
    events = [event(0, 4), event(4, 50, "cudaGraphLaunch", "cuda_runtime"), event(54, 9, category="gpu_memcpy")]
    assert summarise([*events, {"name": "metadata", "ph": "M"}]).wall == 4


def test_a_profile_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel ran"):
        summarise([event(0, 1, category="cuda_runtime")])


def test_the_table_lists_the_longest_first_by_step() -> None:
    lines = summarise([event(0, 10, "short"), event(10, 40, "long")]).table(steps=10, rows=1).splitlines()
    assert [line.split() for line in lines] == [["4.0", "us/step", "long"]]


@pytest.mark.parametrize(
    ("running", "length", "expected"),
    [
        ([1, 5, 10, 10, 9, 10, 3], 3, range(2, 5)),
        ([10, 9, 1, 10, 10, 10, 1], 3, range(3, 6)),
        ([10, 9, 1, 10, 10, 10, 1], 100, range(3, 6)),
        ([10, 10, 2, 10, 10], 4, range(2)),
        ([7], 100, range(1)),
    ],
)
def test_the_fullest_steps_are_consecutive_and_near_the_largest_batch(
    running: list[int], length: int, expected: range
) -> None:
    assert fullest_steps(running, length) == expected
