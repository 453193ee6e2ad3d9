"""What follows from a step's numbers."""

from __future__ import annotations

import pytest

from tests.output_rows import step_stats


@pytest.mark.parametrize(("live", "share"), [(0, 0.0), (3, 0.3), (10, 1.0)])
def test_the_live_fraction_is_the_share_of_all_blocks(live: int, share: float) -> None:
    assert step_stats(0, blocks_total=10, blocks_live=live).live_fraction == share
