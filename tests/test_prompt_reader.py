"""Readers by themselves; tests of prompts, chats and templates run them with a tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from runner.config import ConfigError
from runner.prompt_reader import MessagesReader, TemplateReader, TextReader, column_type
from runner.row_problem import RowProblem
from tests.prompt_rows import batch_of

USER = {"role": "user", "content": "hi"}
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def test_messages_as_structs_and_as_json_are_the_same_to_the_chat() -> None:
    chats = [[USER], [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": None}]]
    as_structs = batch_of(chat=pa.array(chats, MESSAGES))
    as_text = batch_of(chat=[json.dumps(chat) for chat in chats])
    found = []
    for batch in (as_structs, as_text):
        reader = MessagesReader("chat", batch.schema)
        found.append([reader.read(value) for value in reader.values(batch)])
    assert found[0] == found[1]
    assert found[0][1][2] == {"role": "assistant", "content": ""}


def test_fields_beside_role_and_content_stay_unless_they_are_null() -> None:
    calls = [{"function": {"name": "look", "arguments": None}}]
    text = json.dumps([{**USER, "name": None}, {"role": "assistant", "tool_calls": calls}])
    reader = MessagesReader("chat", pa.schema([("chat", pa.string())]))
    assert reader.read(text) == [USER, {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        ('[{"role": "", "content": "x"}]', "each with a role"),
        ('[{"role": 1, "content": "x"}]', "each with a role"),
        ('[{"role": "user", "content": []}]', "has no message with text"),
        ('[{"role": "user"}]', "has no message with text"),
        ("   ", "is blank"),
    ],
)
def test_json_that_holds_no_messages_is_a_problem_of_its_row(text: str, message: str) -> None:
    # trap 42
    reader = MessagesReader("chat", pa.schema([("chat", pa.string())]))
    with pytest.raises(RowProblem, match=f"^column 'chat' .*{message}"):
        reader.read(text)


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        (pa.string(), True),
        (pa.null(), True),
        (MESSAGES, True),
        (pa.large_list(MESSAGES.value_type), True),
        (pa.list_(pa.null()), True),
        (pa.list_(pa.struct([("role", pa.string())])), False),
        (pa.list_(pa.string()), False),
        (MESSAGES.value_type, False),
        (pa.int64(), False),
    ],
)
def test_a_column_that_cannot_hold_messages_is_refused_by_its_type(kind: pa.DataType, accepted: bool) -> None:
    schema = pa.schema([("chat", kind)])
    if accepted:
        assert MessagesReader("chat", schema).columns == ("chat",)
        return
    with pytest.raises(ConfigError, match=r"prompt\.messages_column: 'chat'.*this one is"):
        MessagesReader("chat", schema)


def test_text_that_is_not_utf8_is_a_problem_of_its_own_row_only() -> None:
    column = pa.array([b"one", b"\xff\xfe", b"three"]).view(pa.string())
    schema = batch_of(text=column, n=[1, 2, 3]).schema
    template = TemplateReader("prompt.template", "", "{{ n }} {{ text }}", schema, None)
    values = template.values(batch_of(text=column, n=[1, 2, 3]))
    assert [template.read(values[row]) for row in (0, 2)] == ["1 one", "3 three"]
    with pytest.raises(RowProblem, match="column 'text' holds text that is not valid UTF-8"):
        template.read(values[1])
    text = TextReader("text", pa.schema([("text", pa.string())]))
    values = text.values(batch_of(text=column))
    assert text.read(values[2]) == "three"
    with pytest.raises(RowProblem, match="not valid UTF-8"):
        text.read(values[1])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 10**18, -(10**18)], pa.timestamp("us")),
        pa.array([0, 2**31 - 1, -(2**31)], pa.date32()),
        pa.array([0, 2**62, -(2**62)], pa.duration("s")),
        pa.array([0, 2**62, -(2**62)], pa.timestamp("s", "UTC")),
    ],
)
def test_a_value_that_python_cannot_hold_is_a_problem_of_its_own_row_only(column: pa.Array) -> None:
    batch = batch_of(x=column)
    nested = batch_of(x=pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], column)], ["at"]))
    for each in (batch, nested):
        reader = TemplateReader("prompt.template", "", "{{ x }}!", each.schema, None)
        values = reader.values(each)
        assert reader.read(values[0]).endswith("!")
        for row in (1, 2):
            with pytest.raises(RowProblem, match=r"column 'x' holds a .* that cannot be written"):
                reader.read(values[row])


@pytest.mark.parametrize(
    "text", ['{"role": "user", "role": "system", "content": "x"}', '{"role": "user", "content": 1e999}']
)
def test_json_messages_that_readers_would_change_are_a_problem(text: str) -> None:
    reader = MessagesReader("chat", pa.schema([("chat", pa.string())]))
    with pytest.raises(RowProblem, match=r"is not JSON .*(twice|beyond a 64-bit)"):
        reader.read(f"[{text}]")


def test_text_is_taken_as_it_is_blanks_around_it_included() -> None:
    reader = TextReader("text", pa.schema([("text", pa.string())]))
    assert reader.read("  a\n") == "  a\n"


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary(), pa.dictionary(pa.int8(), pa.int64()), pa.list_(pa.string())])
def test_a_column_that_is_no_text_is_refused_and_pointed_to_a_template(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=r"prompt\.column: 'x'.*this one is .*prompt\.template can render"):
        TextReader("x", pa.schema([("x", kind)]))


def test_a_missing_column_is_refused_under_its_key_unless_no_column_is_known() -> None:
    # trap 42
    with pytest.raises(ConfigError, match=r"some\.key: 'x'; accepted: a column of the source: a, b"):
        column_type("some.key", "x", pa.schema([("a", pa.int8()), ("b", pa.int8())]))
    assert column_type("some.key", "x", pa.schema([])) == pa.null()


def test_values_of_a_column_are_those_of_the_storage_behind_an_extension_type() -> None:
    values: list[Any] = ["a", None]
    extension = pa.ExtensionArray.from_storage(_Marked(), pa.array(values, pa.string()))
    batch = pa.RecordBatch.from_arrays([extension], names=["text"])
    assert column_type("prompt.column", "text", batch.schema) == pa.string()
    assert TextReader("text", batch.schema).values(batch) == values


class _Marked(pa.ExtensionType):
    """Text under a name of its own, as libraries store what they know about a column."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "tests.marked")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> _Marked:
        return cls()
