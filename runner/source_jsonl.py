"""JSON lines as a source: one object a line, read exactly and in bounded memory."""

from __future__ import annotations

import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from runner.json_types import JsonType, JsonTypeError, parse_json
from runner.source_batch import (
    MAX_BATCH_ROWS,
    TARGET_BATCH_BYTES,
    SourceBatch,
    SourceError,
    check_columns,
    parts_between,
)
from runner.source_files import SourceFile, changed

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class _Part:
    """One file as the first pass found it; `sha256` is of its lines, decompressed."""

    file: SourceFile
    rows: int
    sha256: str


class JsonlSource:
    """JSON-lines files read one after the other, in the order given. Blank lines are no rows.

    Opening reads every file once, in bounded memory, because only that tells the columns and their types:
    a column may first appear, or first not be null, in the last line. A column missing from a line is null.
    Python's JSON reader is used for its exact integers; type inference block by block, as readers of
    JSON tables do it, would make floats of ids and times of texts.

    Rows are read in a second pass; a file that is not the same any more is refused at its end, before its
    last batch.

    Raises:
        SourceError: a line that is not a JSON object, or values that do not go together in one column.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        types: dict[str, JsonType] = {}
        self._parts = [_scan(file, types) for file in files]
        self.schema = pa.schema([pa.field(name, each.arrow()) for name, each in types.items()])
        self.num_rows: int | None = sum(part.rows for part in self._parts)

    def batches(self, columns: Sequence[str], skip: int, limit: int | None) -> Iterator[SourceBatch]:
        """See `Source.batches`. Files before `skip` are not read; lines before it are not parsed."""
        if not self.num_rows:
            return
        check_columns(columns, self.schema, self._parts[0].file.path)
        schema = pa.schema([self.schema.field(name) for name in dict.fromkeys(columns)])
        for part, first, stop in parts_between(self._parts, skip, limit):
            yield from _read_part(part, schema, first, skip, stop)

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; the hash is over all lines that are rows."""
        files = [
            {"path": part.file.path, "size": part.file.size, "rows": part.rows, "sha256": part.sha256}
            for part in self._parts
        ]
        return {"format": "jsonl", "rows": self.num_rows, "files": files}


def _lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank."""
    try:
        with file.open(decompress=True) as stream:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield number, text
    except _UNREADABLE as error:
        raise SourceError(f"{file.path}: cannot be read, or truncated: {error}") from error


def _scan(file: SourceFile, types: dict[str, JsonType]) -> _Part:
    """The first pass: count rows and take every value into `types`."""
    digest = hashlib.sha256()
    rows = 0
    for number, line in _lines(file):
        digest.update(line)
        rows += 1
        try:
            for name, value in _parse(file, number, line).items():
                if name not in types:
                    types[name] = JsonType(name)
                types[name].observe(value)
        except JsonTypeError as error:
            raise SourceError(f"{file.path}, line {number}: {error}") from error
    return _Part(file, rows, digest.hexdigest())


def _parse(file: SourceFile, number: int, line: bytes) -> dict[str, Any]:
    """The object on a line."""
    try:
        row = parse_json(line.decode("utf-8").rstrip(" \t\r\n"))
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.colno}"
        raise SourceError(f"{file.path}, line {number}: not a line of JSON: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file.path}, line {number}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise SourceError(f"{file.path}, line {number}: every line must hold one JSON object, not {line[:40]!r}")
    return row


def _read_part(part: _Part, schema: pa.Schema, first: int, skip: int, stop: int) -> Iterator[SourceBatch]:
    """The rows of one file whose ids lie in [skip, stop); `first` is the id of its first row.

    The file is read to its end even where fewer rows are wanted: only that tells whether it is still the
    file of the first pass.
    """
    digest = hashlib.sha256()
    values: list[dict[str, Any]] = []
    size = 0
    start = max(first, skip)
    row_id = first
    for number, line in _lines(part.file):
        digest.update(line)
        if row_id == first + part.rows:
            raise changed(part.file)
        if skip <= row_id < stop:
            values.append(_parse(part.file, number, line))
            size += len(line)
        row_id += 1
        if len(values) == MAX_BATCH_ROWS or size >= TARGET_BATCH_BYTES:
            yield _to_batch(part, values, schema, start)
            start += len(values)
            values, size = [], 0
    if row_id < first + part.rows or digest.hexdigest() != part.sha256:
        raise changed(part.file)
    if values:
        yield _to_batch(part, values, schema, start)


def _to_batch(part: _Part, rows: list[dict[str, Any]], schema: pa.Schema, first: int) -> SourceBatch:
    try:
        arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
    except (pa.ArrowException, OverflowError) as error:
        raise changed(part.file) from error
    return SourceBatch(first, pa.RecordBatch.from_arrays(arrays, schema=schema))
