"""One file of output, written and read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.part_file import ROW_GROUP_ROWS, read_batches, read_columns, write_part
from runner.records import START_OVER, FileRecord, LedgerError
from runner.storage import StorageError, install, temporary

SCHEMA = pa.schema([("row_id", pa.int64()), ("text", pa.string())])


def rows(start: int, stop: int) -> pa.Table:
    return pa.table([list(range(start, stop)), [f"text {row}" for row in range(start, stop)]], schema=SCHEMA)


def write(path: Path, *tables: pa.Table) -> FileRecord:
    record = write_part(path, tables, SCHEMA, "zstd")
    install(path)
    return record


def middles_of_pages(path: Path) -> list[int]:
    """A place in the dictionary page and one in the data page of every column."""
    group = pq.read_metadata(path).row_group(0)
    places = []
    for column in (group.column(index) for index in range(group.num_columns)):
        start, data = column.dictionary_page_offset, column.data_page_offset
        places += [(start + data) // 2, (data + start + column.total_compressed_size) // 2]
    return places


def test_the_record_describes_the_hidden_file_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    record = write_part(path, [rows(0, 3), rows(3, 10)], SCHEMA, "zstd")
    assert os.listdir(tmp_path) == [temporary(path).name]
    content = temporary(path).read_bytes()
    assert record == FileRecord("part.parquet", 10, len(content), hashlib.sha256(content).hexdigest())
    assert pq.read_table(temporary(path)) == rows(0, 10)


def test_no_tables_make_a_readable_file_without_rows(tmp_path: Path) -> None:
    # trap 54
    path = tmp_path / "part.parquet"
    assert write(path).rows == 0
    assert pq.read_table(path) == SCHEMA.empty_table()
    assert sum(batch.num_rows for batch in read_batches(path, 10)) == 0
    assert read_columns(path, ["row_id"]).num_rows == 0


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_batches_hold_the_rows_in_order_and_no_more_than_asked(tmp_path: Path, batch_rows: int) -> None:
    path = tmp_path / "part.parquet"
    write(path, rows(0, 5), rows(5, 23), rows(23, 24))
    batches = list(read_batches(path, batch_rows))
    assert max(batch.num_rows for batch in batches) <= batch_rows
    assert pa.Table.from_batches(batches) == rows(0, 24)


def test_a_large_table_is_split_into_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write(path, rows(0, ROW_GROUP_ROWS + 1))
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [ROW_GROUP_ROWS, 1]


def test_only_the_asked_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write(path, rows(0, 4))
    assert read_columns(path, ["text"]) == rows(0, 4).select(["text"])


def test_a_source_of_tables_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def tables() -> Iterator[pa.Table]:
        yield rows(0, 3)
        raise LedgerError("damaged")

    with pytest.raises(LedgerError, match="damaged"):
        write_part(tmp_path / "part.parquet", tables(), SCHEMA, "zstd")
    assert os.listdir(tmp_path) == []


def test_one_damaged_byte_in_any_page_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write(path, rows(0, 500))
    content = path.read_bytes()
    for place in middles_of_pages(path):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        for read in (lambda: list(read_batches(path, 100)), lambda: read_columns(path, SCHEMA.names)):
            with pytest.raises(LedgerError, match=r"part\.parquet is damaged") as caught:
                read()
            assert str(caught.value).endswith(START_OVER)


@pytest.mark.parametrize("keep", [0, 3, 100])
def test_a_file_cut_short_is_damaged(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "part.parquet"
    write(path, rows(0, 500))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LedgerError, match="is damaged"):
        read_columns(path, ["row_id"])


def test_a_file_that_is_not_there_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read_columns(tmp_path / "part.parquet", ["row_id"])
    with pytest.raises(StorageError, match="No such file"):
        write_part(tmp_path / "nowhere" / "part.parquet", [], SCHEMA, "zstd")
