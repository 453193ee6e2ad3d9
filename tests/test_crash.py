"""The output side killed with SIGKILL at every call that changes the disk, and started again."""

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.config import SinkConfig
from runner.sink import Sink
from tests.output_rows import (
    FINGERPRINT,
    commit_rows,
    open_ledger,
    output_row,
    publish_rows,
    read_folder,
    row_ids_of,
    step_stats,
)

ROWS = 12
CALLS = ("replace", "fsync", "unlink")
OTHER = {**FINGERPRINT, "model": {"path": "other"}}

# Children are forked from a server that has imported the slow libraries, so a start costs little.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["omegaconf", "pyarrow.dataset", "pyarrow.parquet", "pytest", "tqdm"])


def run_job(out: Path) -> None:
    """The whole job, as the runner does it: the rows not committed yet, last ones first, then publishing."""
    with open_ledger(out) as ledger:
        if ledger.is_complete:
            return
        done = {*ledger.committed_rows().tolist()}
        with Sink(ledger, SinkConfig(path=str(out), commit_every="5")) as sink:
            for row in (row for row in reversed(range(ROWS)) if row not in done):
                sink.record_step(step_stats(row))
                sink.write([output_row(row)], None)
        publish_rows(ledger, ROWS, rows_per_part=4)


def restart_job(out: Path) -> None:
    """A different run that takes the folder over."""
    with open_ledger(out, OTHER, restart=True) as ledger:
        commit_rows(ledger, [100, 101])
        publish_rows(ledger, 2)


def kill_before(call_number: int, job: Callable[[Path], None], out: Path) -> None:
    """Run a job and kill this process right before its `call_number`-th change to the disk."""
    calls = itertools.count(1)
    for name in CALLS:
        setattr(os, name, _counted(getattr(os, name), calls, call_number))
    job(out)


def _counted(real: Callable, calls: "itertools.count[int]", fatal: int) -> Callable:
    def counted(*args: object, **more: object) -> object:
        if next(calls) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)

    return counted


def killed(call_number: int, job: Callable[[Path], None], out: Path) -> bool:
    """Whether the job was killed, and not finished before."""
    child = CONTEXT.Process(target=kill_before, args=(call_number, job, out))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def published_or_nothing(out: Path) -> None:
    """What a reader may find after a crash: no row twice, and every visible file whole."""
    rows = [row for path in sorted((out / "completions").glob("[!.]*")) for row in row_ids_of(path)]
    assert len(rows) == len({*rows})


def assert_every_row_once(out: Path) -> None:
    assert row_ids_of(out / "completions") == list(range(ROWS))
    assert os.listdir(out / "_parts") == []
    assert os.listdir(out / "summary") == ["shard-00000.json"]
    assert sorted(os.listdir(out / "_commits")) == ["shard-00000.json", "shard-00000.lock"]
    hidden = [path for path in out.rglob(".*") if path.is_file()]
    assert hidden == []
    attempts = read_folder(out / "stats").select(["attempt", "step"]).to_pydict()
    order = list(zip(attempts["attempt"], attempts["step"], strict=True))
    assert len(order) == len({*order})
    assert attempts["attempt"] == sorted(attempts["attempt"])


@pytest.mark.slow
def test_killed_anywhere_and_started_again_every_row_is_there_once(tmp_path):  # trap 45
    call_number = 1
    while killed(call_number, run_job, tmp_path / f"{call_number}"):
        out = tmp_path / f"{call_number}"
        published_or_nothing(out)
        run_job(out)
        assert_every_row_once(out)
        call_number += 1
    assert_every_row_once(tmp_path / f"{call_number}")
    assert call_number > 40, "the job must have been killed at many places"


@pytest.mark.slow
def test_killed_again_at_every_start_the_job_gets_done(tmp_path):
    for call_number in (9, 14, 20):
        out = tmp_path / f"{call_number}"
        starts = 1
        while killed(call_number, run_job, out) and starts < 50:
            published_or_nothing(out)
            starts += 1
        run_job(out)
        assert_every_row_once(out)


@pytest.mark.slow
def test_a_killed_restart_is_finished_by_the_same_command(tmp_path):
    call_number = 1
    while True:
        out = tmp_path / f"{call_number}"
        run_job(out)
        if not killed(call_number, restart_job, out):
            break
        published_or_nothing(out)
        restart_job(out)
        assert row_ids_of(out / "completions") == [100, 101]
        assert json.loads((out / "summary" / "shard-00000.json").read_text())["rows"] == 2
        call_number += 1
    assert call_number > 15
