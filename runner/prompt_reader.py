"""Readers that take the prompt of a row out of its columns: a text column, a template, or chat messages.

A reader works in three steps, so that the caller can quote control tokens between the last two: `values`
(whole batch to Python), `parse` (one value, checked), `render` (text, or the messages of a chat).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from runner.config import ConfigError
from runner.prompt_template import PromptTemplate, with_nulls
from runner.row_problem import RowProblem

Messages = list[dict[str, Any]]

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class PromptReader(Protocol):
    """One way to get a prompt from a row; `columns` are those it reads."""

    columns: tuple[str, ...]

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """One raw value a row; a RowProblem instead of what cannot be decoded."""

    def parse(self, value: Any) -> Any:
        """The checked value. Raises RowProblem."""

    def render(self, value: Any) -> str | Messages:
        """The prompt text, or the messages of a chat. Raises RowProblem."""


class TextReader:
    """A column whose text is the prompt."""

    def __init__(self, column: str, schema: pa.Schema) -> None:
        kind = column_type("prompt.column", column, schema)
        if not _is_text(kind):
            raise ConfigError(
                "prompt.column", column, f"a column of text (this one is {kind}); prompt.template can render any column"
            )
        self.columns: tuple[str, ...] = (column,)

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """See `PromptReader.values`."""
        return _to_python(batch.column(self.columns[0]), self.columns[0])

    def parse(self, value: Any) -> str:
        """See `PromptReader.parse`: null, empty and blank text is no prompt."""
        return _check_text(value, self.columns[0])

    def render(self, value: str) -> str:
        """See `PromptReader.render`."""
        return value


class TemplateReader:
    """A Jinja template over columns."""

    def __init__(self, key: str, value: str, source: str, schema: pa.Schema) -> None:
        self._key = key
        self._template = PromptTemplate(key, value, source, schema.names)
        self.columns: tuple[str, ...] = self._template.columns

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """See `PromptReader.values`: a dict from column to value."""
        columns = [_to_python(batch.column(name), name) for name in self.columns]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def parse(self, value: dict[str, Any]) -> dict[str, Any]:
        """See `PromptReader.parse`."""
        for each in value.values():
            if isinstance(each, RowProblem):
                raise each
        row: dict[str, Any] = with_nulls(value)
        return row

    def render(self, value: dict[str, Any]) -> str:
        """See `PromptReader.render`: a blank rendering is no prompt."""
        text = self._template.render(value)
        if not text.strip():
            names = ", ".join(map(repr, self.columns))
            raise RowProblem(f"{self._key} renders to blank text; fill or drop the row (columns {names})")
        return text


class MessagesReader:
    """A column of chat messages: lists of structs with role and content, or the same as JSON text."""

    def __init__(self, column: str, schema: pa.Schema) -> None:
        kind = column_type("prompt.messages_column", column, schema)
        self._is_text = _is_text(kind)
        if not self._is_text and not _is_messages(kind):
            accepted = f"a column of lists of {{role, content}}, or of JSON text (this one is {kind})"
            raise ConfigError("prompt.messages_column", column, accepted)
        self.columns: tuple[str, ...] = (column,)

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """See `PromptReader.values`."""
        return _to_python(batch.column(self.columns[0]), self.columns[0])

    def parse(self, value: Any) -> Messages:
        """See `PromptReader.parse`: at least one message, each with a role, not all of them blank."""
        column = self.columns[0]
        messages = _parse_json(_check_text(value, column), column) if self._is_text else value
        if isinstance(messages, RowProblem):
            raise messages
        if messages is None:
            raise RowProblem(f"column {column!r} is null; fill or drop the row")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RowProblem(f"column {column!r} must hold a list of messages, each with a role; correct the row")
        if not any(_has_content(message) for message in messages):
            what = "has no message with text" if messages else "is an empty list"
            raise RowProblem(f"column {column!r} {what}; fill or drop the row")
        return [_present_fields(message) for message in messages]

    def render(self, value: Messages) -> Messages:
        """See `PromptReader.render`."""
        return value


def column_type(key: str, column: str, schema: pa.Schema) -> pa.DataType:
    """The storage type of a column; null in a schema without columns, as of an input without rows.

    Raises:
        ConfigError: (under `key`) there is no such column.
    """
    if not schema.names:
        return pa.null()
    if column not in schema.names:
        raise ConfigError(key, column, f"a column of the source: {', '.join(schema.names)}")
    kind = schema.field(column).type
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(each(kind) for each in kinds)


def _is_messages(kind: pa.DataType) -> bool:
    message = getattr(kind, "value_type", None)
    if message is None or not (pa.types.is_struct(message) or pa.types.is_null(message)):
        return False
    return pa.types.is_null(message) or {"role", "content"} <= {field.name for field in message.fields}


def _to_python(array: pa.Array, column: str) -> list[Any]:
    """The values of an array; a RowProblem where text is not UTF-8, which Parquet files do not rule out."""
    stored = array.storage if isinstance(array, pa.ExtensionArray) else array
    try:
        values: list[Any] = stored.to_pylist()
    except UnicodeDecodeError:
        values = [_decoded(scalar, column) for scalar in stored]
    return values


def _decoded(scalar: pa.Scalar, column: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return RowProblem(f"column {column!r} holds text that is not valid UTF-8 ({error}); correct the row")


def _check_text(value: Any, column: str) -> str:
    if isinstance(value, RowProblem):
        raise value
    if value is None or not value.strip():
        what = "is null" if value is None else "is blank" if value else "is empty"
        raise RowProblem(f"column {column!r} {what}; fill or drop the row")
    text: str = value
    return text


def _parse_json(text: str, column: str) -> Any:
    try:
        messages = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):  # half a pair alone is no text that could be tokenised
            json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"column {column!r} is not JSON ({error}); correct the row") from error
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and message["role"] != ""


def _has_content(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _present_fields(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its null fields: a column gives every message the fields that any of them has.

    Chat templates test whether a field is defined, and would write the content None as "None".
    """
    present = {name: value for name, value in message.items() if value is not None}
    return {**present, "content": present.get("content", "")}
