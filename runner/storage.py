"""Files that are whole or absent: hidden temporaries, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StorageError(Exception):
    """The output folder could not be read or written: exit code 74.

    `path` is the file or folder, `os_error` what the operating system said. Everything committed
    before is kept, and nothing half-written is visible.
    """

    def __init__(self, path: Path, os_error: OSError) -> None:
        self.path = path
        self.os_error = os_error
        remedy = "Make room" if os_error.errno in _FULL else "Repair the storage"
        super().__init__(
            f"{path}: {os_error.strerror or os_error}. Rows committed before are safe and nothing half-written "
            f"is visible. {remedy}, then run the same command again: it goes on where it stopped."
        )


@contextlib.contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn an `OSError` about `path` into a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(path, error) from error


def temporary(path: Path) -> Path:
    """The hidden name under which `path` is written; readers of data folders skip leading dots."""
    return path.with_name(f".{path.name}.tmp")


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, durably."""
    with guarded(folder):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames and deletions done in `folder` survive a power cut."""
    with guarded(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def install(path: Path) -> None:
    """Give the written temporary of `path` its name; lasting once its folder is synced."""
    with guarded(path):
        os.replace(temporary(path), path)


def remove(path: Path) -> None:
    """Delete a file if it is there; lasting once its folder is synced."""
    with guarded(path):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: after a crash it is the old file or the new one, whole."""
    with new_file(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
    install(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[HashingFile]:
    """Write the temporary of `path`, synced at the end and deleted on an error; `install` names it."""
    hidden = temporary(path)
    try:
        with guarded(path), open(hidden, "wb") as raw:
            yield HashingFile(raw)
            raw.flush()
            os.fsync(raw.fileno())
    except BaseException:
        # The first error is the one to report, and on a full disk the space is wanted back.
        with contextlib.suppress(OSError):
            hidden.unlink(missing_ok=True)
        raise


class HashingFile(io.RawIOBase):
    """A file being written, with the size and the hash of what went into it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        """Append `data`, a bytes-like object."""
        self._raw.write(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    @property
    def sha256(self) -> str:
        """The hash of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()
