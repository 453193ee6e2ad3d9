"""One Parquet file of output: how it is written, and read back in pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from runner.records import START_OVER, FileRecord, LedgerError
from runner.storage import StorageError, new_file

ROW_GROUP_ROWS = 10_000
"""Rows of a row group, and about what publishing holds at a time."""

# Many parts are read side by side, and a reader holds a page of each of their columns.
_PAGE_BYTES = 64 * 1024
# A page is ended between write batches only, so these must be small for long texts.
_PAGE_CHECK_ROWS = 64
_READ_BUFFER_BYTES = 64 * 1024


def write_part(path: Path, tables: Iterable[pa.Table], schema: pa.Schema, compression: str) -> FileRecord:
    """Write and sync the hidden temporary of `path`, at least one row group per table.

    No table gives a readable file of no rows. The caller gives the file its name (`storage.install`).

    Raises:
        StorageError: the file could not be written; nothing of it is left.
    """
    rows = 0
    with new_file(path) as file:
        with pq.ParquetWriter(
            pa.PythonFile(file, mode="w"),
            schema,
            compression=compression,
            data_page_size=_PAGE_BYTES,
            write_batch_size=_PAGE_CHECK_ROWS,
            dictionary_pagesize_limit=_PAGE_BYTES,
            write_page_checksum=True,
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
                rows += table.num_rows
        return FileRecord(path.name, rows, file.size, file.sha256)


def read_batches(path: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a file in order, at most `batch_rows` at a time, read page by page.

    Raises:
        LedgerError: the file is not the Parquet file that was written.
        StorageError: the file could not be read.
    """
    with _opened(path) as file:
        yield from file.iter_batches(batch_rows, use_threads=False)


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a whole file; raises like `read_batches`."""
    with _opened(path) as file:
        return file.read(columns, use_threads=False)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    # Opened here, since pyarrow would expand a `~` in the path.
    with (
        _reading(path),
        pa.OSFile(str(path)) as raw,
        pq.ParquetFile(raw, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True) as file,
    ):
        yield file


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tell a failing disk from a damaged file; for the latter pyarrow too raises `OSError`, without a number.

    A damaged footer, which has no checksum, can also end in a ValueError, of UTF-8 for example.
    """
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno:
            raise StorageError(path, error) from error
        raise LedgerError(f"{path} is damaged ({error}). {START_OVER}") from error
