"""One process at a time, with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.shard_lock import ShardBusyError, ShardLock
from runner.storage import StorageError

CHECKOUT = Path(__file__).parents[1]
HOLD = """
import sys
from pathlib import Path
from runner.shard_lock import ShardBusyError, ShardLock
try:
    lock = ShardLock(Path(sys.argv[1]))
except ShardBusyError as error:
    print(error)
    sys.exit(4)
print("held", flush=True)
sys.stdin.read()
"""


def start(path: Path) -> subprocess.Popen[str]:
    """Another process that takes the lock and holds it until its input ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_another_process_is_refused_until_the_lock_is_let_go(tmp_path: Path) -> None:
    # trap 49
    path = tmp_path / "shard.lock"
    lock = ShardLock(path)
    refused = start(path)
    message = refused.communicate()[0]
    assert refused.returncode == 4
    assert f"{path} is locked" in message
    assert f"process {os.getpid()} on {socket.gethostname()}." in message
    lock.close()
    holder = start(path)
    assert said(holder) == "held\n"
    with pytest.raises(ShardBusyError, match=f"process {holder.pid} on"):
        ShardLock(path)
    holder.communicate()
    assert holder.returncode == 0
    ShardLock(path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "shard.lock"
    holder = start(path)
    assert said(holder) == "held\n"
    holder.kill()
    holder.communicate()
    assert path.exists()
    ShardLock(path).close()


def test_two_locks_of_one_process_exclude_each_other_and_a_refusal_takes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shard.lock"
    lock = ShardLock(path)
    for _ in range(2):
        with pytest.raises(ShardBusyError):
            ShardLock(path)
    lock.close()
    ShardLock(path).close()


def test_nothing_of_an_earlier_holder_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shard.lock"
    path.write_text("process 4194304 on a-host-with-a-very-long-name.example.org\nand more\n")
    lock = ShardLock(path)
    assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    lock.close()


def test_a_place_without_files_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        ShardLock(tmp_path / "nowhere" / "shard.lock")
