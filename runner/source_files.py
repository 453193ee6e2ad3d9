"""The files of an input: one file, a folder, or a glob, on a local disk or behind an fsspec URL."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from runner.source_batch import SourceError

SUFFIXES = {"parquet": (".parquet", ".parq", ".pq"), "jsonl": (".jsonl", ".ndjson", ".json")}
COMPRESSED = (".gz", ".bz2", ".xz")
ACCEPTED = (
    f"{', '.join(SUFFIXES['parquet'])} (Parquet) and {', '.join(SUFFIXES['jsonl'])} (JSON lines, "
    f"also with {', '.join(COMPRESSED)})"
)
# A file up to this size is identified by all of its bytes, a larger one by its ends and its time of change.
HASHED_WHOLE_BYTES = 64 * 2**20
_END_BYTES = 2**20
# What file systems other than the local one say about a version of a file, the most telling first.
_VERSION_KEYS = (
    *("ETag", "etag", "version_id", "generation", "blob_id", "content_hash"),
    *("mtime", "LastModified", "last_modified", "updated", "modified", "created"),
)
# One of these lies in every folder that `datasets` saved.
_SAVED_DATASET_MARKS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class FileVersion:
    """A file as it was at one moment: its state and its content key, see `SourceFile.content_key`."""

    file: SourceFile
    state: FileState
    content: dict[str, str | None]

    @classmethod
    def of(cls, file: SourceFile) -> FileVersion:
        """The file as it is now. Raises OSError."""
        state = file.state()
        return cls(file, state, file.content_key(state))

    def check(self) -> None:
        """Refuse a file that is not this version any more; the content counts, not when it was written.

        Raises:
            SourceError: it changed, or is gone.
        """
        try:
            state = self.file.state()
            same = state == self.state or (
                state.size == self.state.size and self.file.content_key(state) == self.content
            )
        except OSError as error:
            raise SourceError(f"{self.file.path}: gone, or not readable any more: {error}") from error
        if not same:
            raise changed(self.file)


def changed(file: SourceFile) -> SourceError:
    """The error of a file that is not the one that was opened."""
    return SourceError(f"{file.path}: changed while the job was reading it; start the job again on a finished file")


class PlaceKind(Enum):
    """What a path turns out to be."""

    FILE = "file"
    FOLDER = "folder"
    GLOB = "glob"
    MISSING = "missing"


@dataclass(frozen=True)
class FileState:
    """What the file system says about a file: its size in bytes, and a mark that changes when it is written.

    `mark` is the time of the last change in nanoseconds of a local file, elsewhere an entity tag, version
    or time, None where the file system keeps none of them.
    """

    size: int
    mark: str | None


@dataclass(frozen=True)
class SourceFile:
    """One input file; `size` is in bytes as stored."""

    filesystem: Any
    path: str
    size: int

    @property
    def is_local(self) -> bool:
        """Whether the file lies on a disk of this machine."""
        return isinstance(self.filesystem, LocalFileSystem)

    def state(self) -> FileState:
        """The file's state now. Raises OSError: it is gone."""
        if self.is_local:
            found = os.stat(self.path)
            return FileState(found.st_size, str(found.st_mtime_ns))
        self.filesystem.invalidate_cache(self.filesystem._parent(self.path))
        info = self.filesystem.info(self.path)
        mark = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), None)
        return FileState(int(info["size"] or 0), mark)

    def content_key(self, state: FileState) -> dict[str, str | None]:
        """What tells this content from another, also one of the same size, as plain JSON values.

        Up to 64 MiB that is a hash over all bytes: a copy has the same key. Of a larger file it is a hash
        over the first and the last MiB, together with the mark of its state: written again, even with the
        same bytes, it counts as changed. Raises OSError.
        """
        digest = hashlib.sha256()
        with self.open() as stream:
            if state.size <= HASHED_WHOLE_BYTES:
                while block := stream.read(_END_BYTES):
                    digest.update(block)
                return {"sha256": digest.hexdigest()}
            digest.update(stream.read(_END_BYTES))
            stream.seek(state.size - _END_BYTES)
            digest.update(stream.read(_END_BYTES))
        return {"ends_sha256": digest.hexdigest(), "changed": state.mark}

    def open(self, *, decompress: bool = False) -> IO[bytes]:
        """The file as a binary stream, decompressed by its suffix if asked."""
        compression = infer_compression(self.path) if decompress else None
        stream: IO[bytes] = self.filesystem.open(self.path, mode="rb", compression=compression)
        return stream


@dataclass(frozen=True)
class Place:
    """A source path, looked up: what it is and on which file system."""

    given: str
    filesystem: Any
    path: str
    kind: PlaceKind

    @property
    def is_saved_dataset(self) -> bool:
        """Whether this is a folder written by `datasets`' `save_to_disk`."""
        if self.kind is not PlaceKind.FOLDER:
            return False
        return any(self.filesystem.exists(f"{self.path.rstrip('/')}/{mark}") for mark in _SAVED_DATASET_MARKS)

    def files(self, file_format: str) -> tuple[str, list[SourceFile]]:
        """The format and the files, in reading order: by name, numbers in names by their value.

        Of a folder, its own files of an accepted suffix; sub-folders are left out. Names that begin with
        `.` or `_` are invisible in folders and globs. `file_format` "auto" goes by the suffix.

        Raises:
            SourceError: no file, a suffix that is not accepted, two formats in one place, or a name that
                is not UTF-8.
        """
        if self.kind is PlaceKind.MISSING:
            raise SourceError(f"source.path {self.given!r} does not exist: there is no such file or folder")
        found = sorted(self._visible(), key=lambda file: _reading_order(file.path))
        if self.kind is PlaceKind.FOLDER:
            wanted = (file_format,) if file_format in SUFFIXES else tuple(SUFFIXES)
            others, found = found, [file for file in found if format_of(file.path) in wanted]
            if not found and others:
                raise SourceError(
                    f"source.path {self.given!r} has no file of an accepted kind, only files such as "
                    f"{_name(others[0].path)!r}; accepted are {ACCEPTED}"
                )
        if not found:
            raise SourceError(f"source.path {self.given!r}: no files matched; names that begin with . or _ are skipped")
        for file in found:
            _check_name(file.path)
        return (file_format if file_format != "auto" else self._common_format(found)), found

    def _common_format(self, files: list[SourceFile]) -> str:
        formats = {}
        for file in files:
            kind = format_of(file.path)
            if kind is None:
                raise SourceError(f"{file.path}: unknown file type; accepted are {ACCEPTED}, or set source.format")
            formats[kind] = file.path
        if len(formats) > 1:
            raise SourceError(
                f"source.path {self.given!r} mixes formats ({' and '.join(map(repr, formats.values()))}); "
                "set source.format or use a glob"
            )
        return next(iter(formats))

    def _visible(self) -> list[SourceFile]:
        if self.kind is PlaceKind.FILE:
            entries = [self.filesystem.info(self.path)]
        elif self.kind is PlaceKind.FOLDER:
            entries = [each for each in self.filesystem.ls(self.path, detail=True) if not _hidden(_name(each["name"]))]
        else:
            # What the pattern spells out may be hidden; what its wildcards match may not.
            fixed = len(re.split(r"[*?\[]", self.path, maxsplit=1)[0].rpartition("/")[0])
            matches = self.filesystem.glob(self.path, detail=True)
            entries = [each for name, each in matches.items() if not _hidden(name[fixed:])]
        return [
            SourceFile(self.filesystem, each["name"], int(each["size"] or 0))
            for each in entries
            if each["type"] == "file"
        ]


def locate(path: str) -> Place:
    """Look a path up. A path that exists as it is written is never taken for a glob.

    Raises:
        SourceError: the file system of a URL is unknown, not installed, or cannot be reached, or the path
            is not UTF-8.
    """
    _check_name(path)
    try:
        filesystem, inside = fsspec.core.url_to_fs(path)
        if filesystem.isfile(inside):
            kind = PlaceKind.FILE
        elif filesystem.isdir(inside):
            kind = PlaceKind.FOLDER
        else:
            kind = PlaceKind.GLOB if re.search(r"[*?\[]", inside) else PlaceKind.MISSING
    except (ValueError, ImportError, OSError) as error:
        raise SourceError(f"source.path {path!r} cannot be opened: {error}") from error
    return Place(path, filesystem, inside, kind)


def format_of(path: str) -> str | None:
    """The format ("parquet" or "jsonl") by a file's suffix, None where it is neither."""
    name = path.lower()
    for ending in COMPRESSED:
        if name.endswith(ending):
            return "jsonl" if name.removesuffix(ending).endswith(SUFFIXES["jsonl"]) else None
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _check_name(path: str) -> None:
    """Refuse what no record or message could hold: Python gives bytes that are not UTF-8 as lone surrogates."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(f"{path!r}: the name of a file or folder is not UTF-8; rename it") from error


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/") if part)


def _reading_order(path: str) -> tuple[list[str | int], str]:
    """A key under which part-2 comes before part-10; texts and numbers alternate, so they never meet."""
    pieces = re.split(r"([0-9]+)", path)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], path
