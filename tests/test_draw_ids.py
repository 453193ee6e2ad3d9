"""Names of rows for the random generator."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from runner.draw_ids import draw_ids


def named(values: list[object], kind: pa.DataType | None = None, first_row: int = 1000) -> list[int]:
    column = pa.chunked_array([pa.array(values, kind)])
    return draw_ids(column, np.arange(first_row, first_row + len(values))).tolist()


@pytest.mark.parametrize("values", [[3, 2**53 + 1, -7, 2**62], ["a", "b", "ü", ""], [b"x", b"y"], [1.5, 2.5]])
def test_a_number_stays_with_its_id_in_any_order(values: list[object]) -> None:
    forwards = dict(zip(values, named(values), strict=True))
    assert len(set(forwards.values())) == len(values)
    assert dict(zip(values[::-1], named(values[::-1], first_row=5), strict=True)) == forwards


def test_large_integers_next_to_nulls_stay_exact() -> None:
    # trap 55
    assert named([2**53 + 1, None, 2**63 - 1]) == [2**53 + 1, 1001, 2**63 - 1]
    assert len(set(named([2**64 - 1, 2**64 - 2, None], pa.uint64()))) == 3


def test_rows_of_the_same_id_are_told_apart() -> None:
    # trap 13
    numbers = named(["a", "a", "b", "a", None, None])
    assert len(set(numbers)) == 6
    assert numbers[0] == named(["a"])[0]


def test_no_rows_have_no_numbers() -> None:
    assert named([], pa.int64()) == []
