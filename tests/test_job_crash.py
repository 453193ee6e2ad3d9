"""A job that is killed, terminated or run over and over, in real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.job_runs import Output, TinyJob, questions

ROWS = 400
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    tiny = TinyJob(tmp_path_factory.mktemp("crash"))
    tiny.write(questions(ROWS))
    return tiny


def arguments(job: TinyJob, out: str) -> list[str]:
    small = ["engine.max_seqs=8", "sampling.max_tokens=24", "sink.commit_every=10", "order.window=64KiB"]
    return job.arguments(out, *small)


def start(job: TinyJob, out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runner", *arguments(job, out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def committed(folder: Path) -> int:
    return len(list(folder.glob("_commits/shard-00000-part-*.json")))


def wait_for_commits(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until the job has committed `count` parts, or is over."""
    while process.poll() is None and committed(folder) < count:
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(job: TinyJob) -> Output:
    process = start(job, "undisturbed")
    assert process.wait() == 0
    return Output(0, job.folder / "undisturbed")


def test_killed_again_and_again_every_row_comes_back_exactly_once(job: TinyJob, undisturbed: Output) -> None:
    # trap 45
    out, rng = job.folder / "killed", random.Random(1)
    kills = resumed = 0
    while True:
        process = start(job, "killed")
        wait_for_commits(process, out, min(committed(out) + rng.randint(1, 8), 38))
        time.sleep(rng.random() * 0.05)
        if kills < 5:
            process.kill()
            kills += 1
        messages = process.communicate()[1]
        resumed += "resuming:" in messages
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, messages
    assert resumed >= 3
    killed = Output(0, out)
    assert [row["row_id"] for row in killed.completions] == list(range(ROWS))
    assert killed.texts() == undisturbed.texts()
    assert killed.summary["rows"] == ROWS
    assert not list(out.glob("_parts/*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_job_commits_what_is_finished_and_goes_on(
    job: TinyJob, undisturbed: Output, number: signal.Signals
) -> None:
    out = job.folder / f"stopped-{number.name}"
    process = start(job, out.name)
    wait_for_commits(process, out, 3)
    process.send_signal(number)
    messages = process.communicate()[1]
    assert process.returncode == 75, messages
    assert "Traceback" not in messages
    assert committed(out) >= 3
    process = start(job, out.name)
    messages = process.communicate()[1]
    assert process.returncode == 0, messages
    assert f"rows {ROWS}/{ROWS} (100%)" in messages
    assert Output(0, out).texts() == undisturbed.texts()


def test_a_killed_job_with_samples_gives_each_row_all_of_them_once(job: TinyJob) -> None:
    # trap 45
    few = ["source.limit=60", "sampling.n=3", "sampling.temperature=1", "sink.commit_every=4"]

    def start_few(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "runner", *arguments(job, out), *few]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    assert start_few("samples").wait() == 0
    for kill_after in (2, 5):
        process = start_few("samples-killed")
        wait_for_commits(process, job.folder / "samples-killed", kill_after)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start_few("samples-killed")
    messages = process.communicate()[1]
    assert process.returncode == 0, messages
    assert "resuming:" in messages
    rows = Output(0, job.folder / "samples-killed").completions
    assert [(row["row_id"], row["sample"]) for row in rows] == [(row, each) for row in range(60) for each in range(3)]
    expected = Output(0, job.folder / "samples").completions
    assert [row["completion"] for row in rows] == [row["completion"] for row in expected]
