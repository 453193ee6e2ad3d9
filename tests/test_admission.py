"""When a waiting sequence may start."""

from __future__ import annotations

import pytest

from engine.admission import Admission


def test_beside_others_a_twentieth_of_the_pool_stays_available() -> None:
    admission = Admission.for_pool(100)
    assert admission.allows(needed=45, available=50, running=1)
    assert not admission.allows(needed=46, available=50, running=1)


@pytest.mark.parametrize(("needed", "allowed"), [(100, True), (101, False)])
def test_alone_a_sequence_may_take_the_whole_pool(needed: int, allowed: bool) -> None:
    assert Admission.for_pool(100).allows(needed=needed, available=100, running=0) is allowed


def test_a_tiny_pool_keeps_nothing_back() -> None:
    assert Admission.for_pool(19).allows(needed=3, available=3, running=5)
