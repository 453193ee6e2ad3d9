"""JSON read exactly, and the Arrow type of a JSON column, found by looking at its values."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import pyarrow as pa

# Half of a surrogate pair, written as an escape; alone it is no text that could be stored or tokenised.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

_INT64_RANGE = range(-(2**63), 2**63)
# Integers up to this size are exact as floating point.
_EXACT_IN_FLOAT = 2**53
_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_WORDS = {bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
_NUMBERS = {int, float}


def parse_json(text: str) -> Any:
    """The value that a JSON text spells, refusing what readers are free to change or drop.

    Raises:
        ValueError: no JSON, NaN or an infinity, a number beyond a double, a repeated key, half a surrogate pair.
        RecursionError: nested too deeply.
    """
    value = json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object_of_distinct_keys
    )
    if _SURROGATE_ESCAPE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits} is beyond a 64-bit floating point number; write it as text")
    return value


def _object_of_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice; keep one")
    return found


class JsonTypeError(Exception):
    """Values of one column that no Arrow type holds exactly."""


class JsonType:
    """The type that holds every value observed so far; nulls fit anywhere.

    `name` is the dotted path of the values, for messages. Integers and decimals together make a column of
    floating point, unless that would change an integer.
    """

    __slots__ = ("_fields", "_item", "_kind", "_large", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._kind: type | None = None
        self._large: int | None = None
        self._item: JsonType | None = None
        self._fields: dict[str, JsonType] = {}

    def observe(self, value: Any) -> None:
        """Take a value into account.

        Raises:
            JsonTypeError: the value does not go together with those before, or is an integer beyond int64.
        """
        if value is None:
            return
        kind = type(value)
        if kind is not self._kind:
            self._admit(kind)
        if kind is int:
            self._observe_integer(value)
        elif kind is list:
            self._item = self._item or JsonType(f"{self.name}[]")
            for each in value:
                self._item.observe(each)
        elif kind is dict:
            for key, each in value.items():
                if key not in self._fields:
                    self._fields[key] = JsonType(f"{self.name}.{key}")
                self._fields[key].observe(each)

    def arrow(self) -> pa.DataType:
        """The Arrow type; null where nothing but nulls was observed."""
        if self._kind is None:
            return pa.null()
        if self._kind is list:
            return pa.list_(self._item.arrow() if self._item is not None else pa.null())
        if self._kind is dict:
            return pa.struct([pa.field(key, each.arrow()) for key, each in self._fields.items()])
        return _ARROW[self._kind]

    def _admit(self, kind: type) -> None:
        if self._kind is None:
            self._kind = kind
        elif {kind, self._kind} == _NUMBERS:
            self._kind = float
            self._check_exact()
        else:
            raise JsonTypeError(f"column {self.name!r} holds {_WORDS[kind]} here and {_WORDS[self._kind]} before")

    def _observe_integer(self, value: int) -> None:
        if value not in _INT64_RANGE:
            raise JsonTypeError(f"column {self.name!r} holds {value}, beyond a 64-bit integer; write it as text")
        if not -_EXACT_IN_FLOAT <= value <= _EXACT_IN_FLOAT:
            self._large = value
            self._check_exact()

    def _check_exact(self) -> None:
        if self._kind is float and self._large is not None:
            raise JsonTypeError(
                f"column {self.name!r} mixes decimals and the integer {self._large}, which is not exact as floating "
                "point; write one of them as text"
            )
