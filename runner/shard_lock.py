"""The lock that lets one process at a time run a shard."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from runner.storage import guarded


class ShardBusyError(Exception):
    """Another process runs the shard: exit code 4."""


class ShardLock:
    """An exclusive lock on a file, held from construction until `close`.

    The operating system drops it when the process ends, however it ends, so a lock never goes stale;
    the file stays. Its text, host and process, only serves the message to a second process.

    Raises:
        ShardBusyError: another process holds it.
        StorageError: the file system refuses the file or the lock.
    """

    def __init__(self, path: Path) -> None:
        with guarded(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(path)
            except BaseException:
                os.close(self._descriptor)
                raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise ShardBusyError(
                f"{path} is locked: this shard is being run by {holder}. Wait for it to end, or choose another "
                "sink.path."
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next process run the shard."""
        os.close(self._descriptor)
