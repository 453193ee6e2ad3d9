"""Records as they are written, read back, and found damaged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.records import (
    START_OVER,
    CommitRecord,
    FileRecord,
    LedgerError,
    PublishRecord,
    RowTotals,
    read_commit,
    read_object,
    read_publication,
)
from runner.storage import StorageError, write_json

FILE = FileRecord("shard-00000-part-00000.parquet", rows=3, size=1000, sha256="ab" * 32)
COMMIT = CommitRecord(2, "f" * 64, 4, 9, RowTotals(3, 3, 1, 20, 8, 6), FILE, None)
PUBLICATION = PublishRecord(
    2, "f" * 64, RowTotals(3, 3, 1, 20, 8, 6), (FILE,), (), {"rows": 3, "seconds": {"load": 1.5}}
)
READERS = pytest.mark.parametrize("read", [read_commit, read_publication, read_object])

Read = Callable[[Path], Any]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    for record, read in ((COMMIT, read_commit), (PUBLICATION, read_publication)):
        write_json(tmp_path / "record.json", dataclasses.asdict(record))
        assert read(tmp_path / "record.json") == record


def test_a_part_of_steps_alone_has_no_rows_and_no_file_of_them(tmp_path: Path) -> None:
    record = dataclasses.replace(COMMIT, first_row_id=None, last_row_id=None, completions=None, stats=FILE)
    write_json(tmp_path / "record.json", dataclasses.asdict(record))
    assert read_commit(tmp_path / "record.json") == record


@READERS
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"\0" * 200, b"[]", b"null", b'"x"', b"[" * 100_000])
def test_a_damaged_file_is_an_error_that_says_what_to_do_and_never_an_absence(
    tmp_path: Path, read: Read, content: bytes
) -> None:
    # trap 47
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(LedgerError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is unreadable (")
    assert str(caught.value).endswith(START_OVER)


@READERS
def test_a_file_that_cannot_be_read_is_a_fault_of_the_storage(tmp_path: Path, read: Read) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read(tmp_path / "record.json")
    with pytest.raises(StorageError, match="Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": ...},
        {"attempt": "a"},
        {"attempt": True},
        {"attempt": 1.0},
        {"attempt": -1},
        {"first_row_id": "0"},
        {"fingerprint": 5},
        {"totals": ...},
        {"completions": ...},
        {"unheard_of": 1},
        {"totals": None},
        {"totals": {"lines": 1}},
        {"totals": {"rows": "1"}},
        {"completions": ""},
        {"completions": "shard-00000-part-00000.parquet"},
        {"completions": {"name": "x"}},
        {"stats": {**dataclasses.asdict(FILE), "name": "../elsewhere.parquet"}},
        {"stats": {**dataclasses.asdict(FILE), "size": "1000"}},
        {"stats": {**dataclasses.asdict(FILE), "rows": None}},
    ],
)
def test_a_commit_record_with_other_content_is_damaged_too(tmp_path: Path, change: dict[str, Any]) -> None:
    # trap 47
    value = {key: each for key, each in (dataclasses.asdict(COMMIT) | change).items() if each is not ...}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(value))
    with pytest.raises(LedgerError, match="not a commit record"):
        read_commit(path)


@pytest.mark.parametrize(
    "change",
    [
        {"completions": ...},
        {"completions": None},
        {"completions": [None]},
        {"attempts": None},
        {"summary": ...},
        {"summary": []},
        {"stats": "shard"},
        {"stats": [{**dataclasses.asdict(FILE), "name": "/etc/passwd"}]},
    ],
)
def test_a_publish_record_with_other_content_is_damaged_too(tmp_path: Path, change: dict[str, Any]) -> None:
    # trap 47
    value = {key: each for key, each in (dataclasses.asdict(PUBLICATION) | change).items() if each is not ...}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(value))
    with pytest.raises(LedgerError, match="not a publish record"):
        read_publication(path)


def test_one_kind_of_record_is_not_taken_for_the_other(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, dataclasses.asdict(COMMIT))
    with pytest.raises(LedgerError):
        read_publication(path)
    write_json(path, dataclasses.asdict(PUBLICATION))
    with pytest.raises(LedgerError):
        read_commit(path)


def test_totals_add_up_and_differ_field_by_field() -> None:
    assert RowTotals(1, 2, 3, 4, 5, 6) + RowTotals(10, 20, 30, 40, 50, 60) == RowTotals(11, 22, 33, 44, 55, 66)
    assert sum([RowTotals(1, 2, 3, 4, 5, 6)] * 2, RowTotals()) == RowTotals(2, 4, 6, 8, 10, 12)
    assert RowTotals(11, 22, 33, 44, 55, 66) - RowTotals(10, 20, 30, 40, 50, 60) == RowTotals(1, 2, 3, 4, 5, 6)
