"""Parquet files as a source: all footers are read at open, row groups are streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runner.source_batch import SourceBatch, SourceError, check_columns, clip, parts_between, rows_per_batch
from runner.source_files import FileVersion, SourceFile, changed
from runner.source_types import cast, merged_type, schema_without_views

# Footers of many files on a remote store are a wait, not work.
_FOOTER_READERS = 8
# Column chunks are read through a buffer of this size, not whole: a row group may be larger than memory.
_READ_BUFFER_BYTES = 4 * 2**20
_FOOTER_TAIL_BYTES = 8  # footer length (little-endian int32) and magic


@dataclass(frozen=True)
class _Part:
    """One file as it was when it was opened; `schema` has no views."""

    version: FileVersion
    schema: pa.Schema
    group_rows: tuple[int, ...]
    footer_sha256: str

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    @property
    def path(self) -> str:
        return self.version.file.path


class ParquetSource:
    """Parquet files read one after the other, in the order given.

    The columns are those of the first file; every other file must have them. Where their types differ,
    the batches have one type that holds both exactly (int64 for int32 and int64, large_string for string
    and large_string, the other type for a column of nulls only). Views are read as plain types.

    A file that changes after it was opened is refused, before its first row and again after its last.

    Raises:
        SourceError: a file that is truncated or no Parquet, a missing column, types that do not go together.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        with ThreadPoolExecutor(min(_FOOTER_READERS, len(files))) as readers:
            self._parts = list(readers.map(_read_footer, files))
        self.schema = _common_schema(self._parts)
        self.num_rows: int | None = sum(part.rows for part in self._parts)

    def batches(self, columns: Sequence[str], skip: int, limit: int | None) -> Iterator[SourceBatch]:
        """See `Source.batches`. Row groups before `skip` are not decoded."""
        check_columns(columns, self.schema, self._parts[0].path)
        schema = pa.schema([self.schema.field(name) for name in dict.fromkeys(columns)])
        for part, first, stop in parts_between(self._parts, skip, limit):
            yield from _read_part(part, schema, first, skip, stop)

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; of the content of a file, see `SourceFile.content_key`."""
        files = [
            {
                "path": part.path,
                "size": part.version.state.size,
                "rows": part.rows,
                "footer_sha256": part.footer_sha256,
                **part.version.content,
            }
            for part in self._parts
        ]
        return {"format": "parquet", "rows": self.num_rows, "files": files}


def _open(file: SourceFile) -> pa.NativeFile:
    return pa.OSFile(file.path) if file.is_local else pa.PythonFile(file.open(), mode="r")


def _read_footer(file: SourceFile) -> _Part:
    try:
        version = FileVersion.of(file)
        with _open(file) as stream:
            parquet = pq.ParquetFile(stream)
            metadata, schema = parquet.metadata, schema_without_views(parquet.schema_arrow)
            names = schema.names
            digest = _footer_sha256(stream, version.state.size)
    except UnicodeDecodeError as error:
        raise SourceError(f"{file.path}: the name of a column is not UTF-8 ({error}); rename it") from error
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.path}: not a readable Parquet file, or truncated: {error}") from error
    for name in names:
        if names.count(name) > 1:
            raise SourceError(f"{file.path}: two columns are named {name!r}; rename one")
    groups = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    return _Part(version, schema, groups, digest)


def _footer_sha256(stream: pa.NativeFile, size: int) -> str:
    stream.seek(size - _FOOTER_TAIL_BYTES)
    footer_bytes = int.from_bytes(stream.read(4), "little")
    stream.seek(size - _FOOTER_TAIL_BYTES - footer_bytes)
    return hashlib.sha256(stream.read(footer_bytes)).hexdigest()


def _common_schema(parts: Sequence[_Part]) -> pa.Schema:
    """The first file's columns, each with the type that holds the values of all files."""
    first = parts[0]
    for part in parts[1:]:
        for name in first.schema.names:
            if name not in part.schema.names:
                raise SourceError(
                    f"{part.path}: column {name!r} is missing; {first.path} has it, and every file of a source "
                    f"needs the columns of the first (this one has: {', '.join(part.schema.names)})"
                )
    return pa.schema([pa.field(name, _common_type(name, parts)) for name in first.schema.names])


def _common_type(name: str, parts: Sequence[_Part]) -> pa.DataType:
    common: pa.DataType = parts[0].schema.field(name).type
    for part in parts[1:]:
        other = part.schema.field(name).type
        merged = merged_type(common, other)
        if merged is None:
            raise SourceError(
                f"{part.path}: column {name!r} is {other}, which does not go together with {common} in the files "
                "before it; write all files with one type"
            )
        common = merged
    return common


def _read_part(part: _Part, schema: pa.Schema, first: int, skip: int, stop: int) -> Iterator[SourceBatch]:
    """The rows of one file whose ids lie in [skip, stop); `first` is the id of its first row."""
    part.version.check()
    try:
        with _open(part.version.file) as stream:
            # The name may lead to another file by now, so the stream itself is asked.
            if _footer_sha256(stream, part.version.state.size) != part.footer_sha256:
                raise changed(part.version.file)
            yield from _read_groups(part, _reader(stream), schema, first, skip, stop)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{part.path}: cannot be opened any more: {error}") from error
    part.version.check()


def _reader(stream: pa.NativeFile) -> pq.ParquetFile:
    return pq.ParquetFile(stream, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)


def _read_groups(
    part: _Part, parquet: pq.ParquetFile, schema: pa.Schema, first: int, skip: int, stop: int
) -> Iterator[SourceBatch]:
    for group, rows in enumerate(part.group_rows):
        end = first + rows
        if first < stop and end > skip:
            for batch in _read_group(part, parquet, group, schema):
                clipped = clip(batch, first, skip, stop)
                first += batch.num_rows
                if clipped is not None:
                    yield clipped
                if first >= stop:
                    return
            if first != end:
                raise SourceError(
                    f"{part.path}: row group {group} has {rows - (end - first)} rows where its footer says {rows}; "
                    "write the file again"
                )
        first = end


def _read_group(part: _Part, parquet: pq.ParquetFile, group: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches of one row group, cast to `schema`."""
    batch_rows = rows_per_batch(_mean_row_bytes(parquet.metadata.row_group(group), schema.names))
    try:
        reader = parquet.iter_batches(batch_rows, row_groups=[group], columns=schema.names)
        for batch in reader:
            arrays = [cast(batch.column(field.name), field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{part.path}: row group {group} cannot be read: {error}") from error


def _mean_row_bytes(group: pq.RowGroupMetaData, names: Sequence[str]) -> float:
    """Uncompressed bytes a row of the given columns takes in the file."""
    columns = (group.column(index) for index in range(group.num_columns))
    size = sum(
        column.total_uncompressed_size
        for column in columns
        if any(column.path_in_schema == name or column.path_in_schema.startswith(f"{name}.") for name in names)
    )
    return size / max(group.num_rows, 1)
