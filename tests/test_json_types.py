"""Arrow types of JSON columns: what is accepted is held exactly."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.json_types import JsonType, JsonTypeError, parse_json

EXACT = 2**53  # integers up to here are exact as floating point


def type_of(*values: Any) -> pa.DataType:
    kind = JsonType("x")
    for value in values:
        kind.observe(value)
    return kind.arrow()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], pa.null()),
        ([None], pa.null()),
        ([None, True], pa.bool_()),
        ([None, 2**63 - 1, -(2**63)], pa.int64()),
        ([1, 0.5, None], pa.float64()),
        ([0.5, EXACT, -EXACT], pa.float64()),
        (["", None], pa.string()),
        ([[]], pa.list_(pa.null())),
        ([[None], [], [1]], pa.list_(pa.int64())),
        ([[[1]], [[], [0.5]]], pa.list_(pa.list_(pa.float64()))),
        ([{}], pa.struct([])),
        ([{"a": None}, {"b": [True]}, {"a": "x"}], pa.struct([("a", pa.string()), ("b", pa.list_(pa.bool_()))])),
    ],
)
def test_the_type_is_the_narrowest_that_holds_all_values(values: list[Any], kind: pa.DataType) -> None:
    assert type_of(*values) == kind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([True, 1], "column 'x' holds a number here and true/false before"),
        ([1, "1"], "column 'x' holds text here and a number before"),
        (["x", ["x"]], "column 'x' holds a list here and text before"),
        ([[1, {}]], r"column 'x\[\]' holds an object here and a number before"),
        ([{"a": {"b": [1]}}, {"a": {"b": ["x"]}}], r"column 'x\.a\.b\[\]' holds text here"),
        ([2**63], f"column 'x' holds {2**63}, beyond a 64-bit integer"),
        ([-(2**63) - 1], "beyond a 64-bit integer"),
    ],
)
def test_values_that_no_type_holds_are_refused_by_the_path_to_them(values: list[Any], message: str) -> None:
    with pytest.raises(JsonTypeError, match=message):
        type_of(*values)


@pytest.mark.parametrize("large", [EXACT + 1, -EXACT - 1, 2**63 - 1])
def test_an_integer_that_floating_point_would_change_is_refused_whenever_the_decimal_comes(large: int) -> None:
    # trap 55
    for values in ([large, 0.5], [0.5, large], [large, 3, None, 0.5], [0.5, None, 3, large]):
        with pytest.raises(JsonTypeError, match=f"mixes decimals and the integer {large}"):
            type_of(*values)
    assert type_of(large, 3) == pa.int64()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
COLUMNS = st.one_of(
    st.lists(SCALARS),
    *(st.lists(each | st.none()) for each in (st.integers() | st.floats(allow_nan=False), st.text(), st.booleans())),
    st.lists(st.lists(st.integers() | st.floats(allow_nan=False)) | st.none()),
)


@settings(deadline=None)
@given(COLUMNS)
def test_whatever_is_accepted_comes_back_equal(values: list[Any]) -> None:
    try:
        kind = type_of(*values)
    except JsonTypeError:
        return
    assert pa.array(values, kind).to_pylist() == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e400", "beyond a 64-bit floating point number"),
        ("[-1e309]", "beyond a 64-bit floating point number"),
        ("Infinity", "Infinity is not JSON"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' twice"),
        ('{"a": 1, "\\u0061": 1}', "the key 'a' twice"),
        ('"\\ud800"', "surrogates not allowed"),
    ],
)
def test_json_that_readers_would_change_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_is_read_exactly() -> None:
    assert parse_json('{"a": [1.5, 9007199254740993, 1e308], "b": {"a": "\\ud83d\\ude00"}}') == {
        "a": [1.5, 2**53 + 1, 1e308],
        "b": {"a": "😀"},
    }
