"""Readers that take the prompt of a row out of its columns: a text column, a template, or chat messages.

A reader takes the values of a whole batch to Python, and then one value after the other to text, or to the
messages of a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from runner.config import ConfigError
from runner.control_tokens import ControlTokens
from runner.json_types import parse_json
from runner.prompt_template import PromptTemplate, with_nulls
from runner.row_problem import RowProblem

Messages = list[dict[str, Any]]

# Text that is not UTF-8 is a ValueError; times out of range are any of these.
_UNHELD = (ValueError, OverflowError, pa.ArrowException)


class PromptReader(Protocol):
    """One way to get a prompt from a row; `columns` are those it reads."""

    columns: tuple[str, ...]

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """One raw value a row; a RowProblem instead of what cannot be decoded."""

    def read(self, value: Any) -> str | Messages:
        """The prompt text of one value, or the messages of a chat. Raises RowProblem."""


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

    def read(self, value: Any) -> str:
        """See `PromptReader.read`: null, empty and blank text is no prompt."""
        return _check_text(value, self.columns[0])


class TemplateReader:
    """A Jinja template over columns; for `control`, see `PromptTemplate`."""

    def __init__(self, key: str, value: str, source: str, schema: pa.Schema, control: ControlTokens | None) -> None:
        self._key = key
        self._template = PromptTemplate(key, value, source, schema.names, control)
        self.columns: tuple[str, ...] = self._template.columns

    def values(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """See `PromptReader.values`: a dict from column to value."""
        columns = [_to_python(batch.column(name), name) for name in self.columns]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def read(self, value: dict[str, Any]) -> str:
        """See `PromptReader.read`: a blank rendering is no prompt."""
        for each in value.values():
            if isinstance(each, RowProblem):
                raise each
        text = self._template.render(with_nulls(value))
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

    def read(self, value: Any) -> Messages:
        """See `PromptReader.read`: at least one message, each with a role, not all of them blank."""
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
    """The values of an array; a RowProblem where Python cannot hold one, as text that is not UTF-8 or a far time."""
    stored = array.storage if isinstance(array, pa.ExtensionArray) else array
    try:
        values: list[Any] = stored.to_pylist()
    except _UNHELD:
        values = [_held(scalar, column) for scalar in stored]
    return values


def _held(scalar: pa.Scalar, column: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return RowProblem(f"column {column!r} holds text that is not valid UTF-8 ({error}); correct the row")
    except _UNHELD as error:
        return RowProblem(f"column {column!r} holds a {scalar.type} that cannot be written ({error}); correct the row")


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
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"column {column!r} is not JSON ({error}); correct the row") from error


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
