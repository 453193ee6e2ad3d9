"""The ladder of captured sizes. Capturing itself needs a GPU: tests/gpu/test_step_graphs_gpu.py."""

from __future__ import annotations

import pytest

from engine.step_graphs import DECODE_SIZES, LARGE_SIZES, MIXED_SIZES, ladder


def test_sizes_rise() -> None:
    for sizes in (DECODE_SIZES, MIXED_SIZES + LARGE_SIZES):
        assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize("largest", [1, 3, 16, 17, 100, 1024, 5000])
def test_a_ladder_ends_with_the_largest_step_there_is(largest: int) -> None:
    # trap 23
    sizes = ladder(DECODE_SIZES, largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert set(sizes[:-1]) <= set(DECODE_SIZES)
