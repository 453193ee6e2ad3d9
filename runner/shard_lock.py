"""The lock that lets one process at a time run a shard."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from runner.storage import guarded


class ShardBusyError(Exception):
    """Another process runs the shard: exit code 4."""


# A file or file system that this process may only read.
_NO_WRITING = {errno.EACCES, errno.EPERM, errno.EROFS}


class ShardLock:
    """An exclusive lock on a file, held from construction until `close`.

    The operating system drops it when the process ends, however it ends, so a lock never goes stale;
    the file stays. Its text, host and process, only serves the message to a second process.

    Args:
        path: the file, created if absent.
        only_reading: where the file cannot be written, share the lock with others who only read.

    Raises:
        ShardBusyError: another process holds it.
        StorageError: the file system refuses the file or the lock.
    """

    def __init__(self, path: Path, *, only_reading: bool = False) -> None:
        with guarded(path):
            self._descriptor, writable = _open(path, only_reading)
            try:
                self._lock(path, writable)
            except BaseException:
                os.close(self._descriptor)
                raise

    def _lock(self, path: Path, writable: bool) -> None:
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise ShardBusyError(
                f"{path} is locked: this shard is being run by {holder}. Wait for it to end, or choose another "
                "sink.path."
            ) from error
        if writable:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next process run the shard."""
        os.close(self._descriptor)


def _open(path: Path, only_reading: bool) -> tuple[int, bool]:
    """A descriptor of the file, and whether it can be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), True
    except OSError as error:
        if not only_reading or error.errno not in _NO_WRITING:
            raise
    return os.open(path, os.O_RDONLY), False
