"""The JSON records that say which files count: one per committed part, one per published shard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from runner.storage import guarded

T = TypeVar("T")

START_OVER = "Restore it, start over with resume=restart, or choose another sink.path."


class LedgerError(Exception):
    """The output folder is not what its records say, or a record cannot be read: exit code 2."""


@dataclass(frozen=True)
class FileRecord:
    """A Parquet file: its size in bytes and its sha256 in hexadecimal."""

    name: str
    rows: int
    size: int
    sha256: str


@dataclass(frozen=True)
class RowTotals:
    """Sums over output: `rows` of the input and their `completions`, the samples of each, `errors` among them.

    Tokens are of completions without an error. The prompt of a row and what the cache had of it count once,
    however many samples it has.
    """

    rows: int = 0
    completions: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: RowTotals) -> RowTotals:
        names = [field.name for field in dataclasses.fields(self)]
        return RowTotals(*(getattr(self, name) + getattr(other, name) for name in names))

    def __sub__(self, other: RowTotals) -> RowTotals:
        names = [field.name for field in dataclasses.fields(self)]
        return RowTotals(*(getattr(self, name) - getattr(other, name) for name in names))


@dataclass(frozen=True)
class CommitRecord:
    """One committed part of `attempt`: finished rows, launched steps, or both.

    `fingerprint` is the digest of the run that wrote it; row ids are those of the smallest and the
    largest row, None without rows.
    """

    attempt: int
    fingerprint: str
    first_row_id: int | None
    last_row_id: int | None
    totals: RowTotals
    completions: FileRecord | None
    stats: FileRecord | None


@dataclass(frozen=True)
class PublishRecord:
    """A complete shard: the files that hold all its rows and steps, after `attempts` attempts.

    `summary` is the content of the shard's summary file, as JSON values.
    """

    attempts: int
    fingerprint: str
    totals: RowTotals
    completions: tuple[FileRecord, ...]
    stats: tuple[FileRecord, ...]
    summary: Mapping[str, Any]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        LedgerError: it is damaged; a damaged record is never taken for an absent one.
        StorageError: it could not be read.
    """
    with guarded(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is unreadable ({error}). {START_OVER}") from error
    if not isinstance(value, dict):
        raise LedgerError(f"{path} is unreadable (it holds no JSON object). {START_OVER}")
    return value


def read_commit(path: Path) -> CommitRecord:
    """The commit record in a file; raises like `read_object`."""
    value = read_object(path)
    try:
        totals = _checked(RowTotals, value["totals"])
        files = {name: None if value[name] is None else _file(value[name]) for name in ("completions", "stats")}
        return _checked(CommitRecord, {**value, "totals": totals, **files})
    except (KeyError, TypeError) as error:
        raise LedgerError(f"{path} is unreadable (not a commit record: {error}). {START_OVER}") from error


def read_publication(path: Path) -> PublishRecord:
    """The publish record in a file; raises like `read_object`."""
    value = read_object(path)
    try:
        totals = _checked(RowTotals, value["totals"])
        files = {name: tuple(map(_file, value[name])) for name in ("completions", "stats")}
        return _checked(PublishRecord, {**value, "totals": totals, **files})
    except (KeyError, TypeError) as error:
        raise LedgerError(f"{path} is unreadable (not a publish record: {error}). {START_OVER}") from error


# What JSON may hold for a field, by its annotation.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "str": (str,),
    "Mapping[str, Any]": (dict,),
}


def _checked(kind: type[T], values: Mapping[str, Any]) -> T:
    """A record with these fields. Raises TypeError for a field too few or too many, or a value of a wrong kind."""
    record = kind(**values)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value, accepted = getattr(record, field.name), _JSON_TYPES.get(str(field.type))
        if accepted is not None and (not isinstance(value, accepted) or isinstance(value, bool)):
            raise TypeError(f"{field.name} is {value!r}")
        if isinstance(value, int) and value < 0:
            raise TypeError(f"{field.name} is {value}, below 0")
    return record


def _file(value: Mapping[str, Any]) -> FileRecord:
    """A file's record; its name must stay inside its folder."""
    record = _checked(FileRecord, value)
    if Path(record.name).name != record.name:
        raise TypeError(f"{record.name!r} is no file name")
    return record
