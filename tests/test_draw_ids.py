"""Names of rows for the random generator."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from runner.draw_ids import draw_ids


def named(values: pa.Array | list[object], prompts: list[list[int]] | None = None, first_row: int = 1000) -> list[int]:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    token_ids = [np.array(each, np.int32) for each in prompts or [[1, 2]] * len(array)]
    return draw_ids(pa.chunked_array([array]), np.arange(first_row, first_row + len(array)), token_ids).tolist()


def dictionary(values: list[str], indices: list[int]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))


IDS = {
    "integers": pa.array([3, 2**53 + 1, 2**53, -7, 2**63 - 1, 0]),
    "unsigned": pa.array([2**64 - 1, 2**64 - 2, 2**63, 0], pa.uint64()),
    "texts": pa.array(["a", "b", "\u00fc", "", "a\0"]),
    "no utf-8": pa.array([b"\xff", b"\xfe", b"x"]).view(pa.string()),
    "views": pa.array(["a", "b", "a long text, not held in the view"], pa.string_view()),
    "bytes": pa.array([b"x", b"y", b""]),
    "fixed": pa.array([b"xx", b"yy"], pa.binary(2)),
    "floats": pa.array([1.5, 2.5, float("nan"), float("inf")]),
    "halves": pa.array(np.array([1, 2], np.float16)),
    "truths": pa.array([True, False]),
    "decimals": pa.array([Decimal("1.10"), Decimal("2.00")], pa.decimal256(70, 10)),
    "far times": pa.array([10**18, -(10**18), 0], pa.timestamp("us", "UTC")),
    "far dates": pa.array([2**31 - 1, -(2**31), 0], pa.date32()),
    "times": pa.array([1, 2], pa.time64("ns")),
    "spans": pa.array([2**62, 1], pa.duration("s")),
    "structs": pa.array([{"a": 1, "b": ["x"]}, {"a": 1, "b": ["y"]}, {"a": None, "b": None}]),
    "lists": pa.array([[1], [2], [], [1, 2]]),
    "far times in lists": pa.array([[10**18], [1]], pa.list_(pa.timestamp("us"))),
    "maps": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
    "intervals": pa.array([pa.MonthDayNano([1, 2, 3]), pa.MonthDayNano([1, 2, 4])]),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_a_number_stays_with_its_id_in_any_order_and_batch(ids: pa.Array) -> None:
    numbers = named(ids)
    assert len(set(numbers)) == len(ids)
    backwards = pa.concat_arrays([ids.slice(at, 1) for at in reversed(range(len(ids)))])
    assert named(backwards, first_row=5) == numbers[::-1]
    assert named(ids.slice(1)) == numbers[1:]
    chunked = pa.chunked_array([ids.slice(0, 1), ids.slice(1)])
    prompts = [np.array([1, 2], np.int32)] * len(ids)
    assert draw_ids(chunked, np.arange(len(ids)), prompts).tolist() == numbers


def test_a_number_does_not_depend_on_how_values_are_stored() -> None:
    assert named(pa.array([1, -2], pa.int8())) == named(pa.array([1, -2], pa.int64()))
    texts = [pa.array(["a", "b"], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    texts += [dictionary(["a", "b"], [0, 1]), dictionary(["b", "a"], [1, 0])]
    assert len({tuple(named(each)) for each in texts}) == 1
    lists = [pa.ListArray.from_arrays([0, 1, 2], each) for each in texts[-2:]]
    assert named(lists[0]) == named(lists[1])


def test_a_null_takes_its_row_id_which_is_no_integer_id() -> None:  # trap 55
    numbers = named([None, None, 1000, 1001, 0])
    assert len(set(numbers)) == 5
    assert named([None], first_row=1001) == [numbers[1]]
    assert len(set(named(pa.nulls(3)))) == 3


def test_rows_of_the_same_id_are_told_apart_by_their_prompts_wherever_they_stand() -> None:  # trap 13
    numbers = named(["a", "a", "b"], [[1], [2], [1]])
    assert len(set(numbers)) == 3
    assert named(["a"], [[2]]) == [numbers[1]]
    assert named(["b", "a", "x", "a"], [[1], [2], [9], [1]])[:2] == [numbers[2], numbers[1]]


def test_rows_of_the_same_id_and_prompt_are_told_apart() -> None:  # trap 13
    numbers = named(["a", "b", "a", "a"])
    assert len(set(numbers)) == 4
    assert numbers[0] == named(["a"])[0]


def test_id_and_prompt_do_not_run_into_each_other() -> None:
    one = named([(1).to_bytes(4, "little")], [[2]])
    assert one != named([b""], [[1, 2]])
    assert named([datetime.date(1970, 1, 2)], [[]]) != named([b""], [[1]])


def test_no_rows_have_no_numbers() -> None:
    assert named(pa.array([], pa.int64())) == []
    assert draw_ids(pa.chunked_array([], pa.string()), np.arange(0), []).dtype == np.int64
