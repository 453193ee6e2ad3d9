import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import __main__ as command_line
from runner.config import ConfigError
from runner.environment import UnusableEnvironmentError
from runner.fingerprint import FingerprintError
from runner.interrupts import Interrupted, stoppable
from runner.records import LedgerError
from runner.shard_lock import ShardBusyError
from runner.source_batch import SourceError
from runner.storage import StorageError
from tests.output_rows import open_ledger

CHECKOUT = Path(command_line.__file__).parents[1]
JOB = "source: {path: missing.parquet}\nprompt: {column: text}\nmodel: {path: model}\nsink: {path: out}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the job `mine`."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says on standard error when it refuses these arguments."""
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_without_a_job_the_jobs_are_listed_with_what_to_type(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([], capsys)
    assert "type job=NAME" in said
    assert f"mine             {here / 'jobs' / 'mine.yaml'}" in said
    assert "demo  " in said
    assert "python -m runner job=demo" in said


def test_the_example_is_a_job_that_can_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "jobs" / "a.yaml").write_text("source: [")
    assert "python -m runner job=demo" in refused([], capsys)
    (here / "jobs" / "demo.yaml").write_text("source: [")
    assert "python -m runner job=mine" in refused([], capsys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["job=mine.yaml"], "job=mine perhaps"),
        (["job=mien"], "mine perhaps; one of demo, mine"),
        (["job=mine", "sampling.top_p=2"], "sampling.top_p: 2.0; accepted: a number above 0, up to 1"),
        (["job=mine", "sampling.max_tokens=1.5"], "sampling.max_tokens: 1.5; accepted: a whole number"),
        (["job=mine", "engine.blocksize=32"], "engine.block_size perhaps"),
        (["job=mine", "prompt.system=你好"], """for a shell: 'prompt.system="你好"'"""),  # trap 52
        (["job=mine", "prompt.system=${nothing}"], "Interpolation key 'nothing' not found"),
        (["job=mine", "--config-dir", "nowhere"], "a folder that exists"),
        (["job=mine", "sampling.stop=[[a]]"], "sampling.stop: [['a']]; accepted: a list of texts"),
        (["job=mine", "sink.path=hdfs://a/b"], "a local folder"),
        (["job=mine", "sink.path=jobs/mine.yaml"], "this is a file"),
        (["job=mine", "prompt.chat_kwargs={1: a}"], "prompt.chat_kwargs: {1: 'a'}; accepted: a mapping from names"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(arguments, capsys)
    assert expected in said
    assert said.count("\n") == 1


def test_an_unknown_option_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["job=mine", "--multirun"])
    assert caught.value.code == 2


def test_cfg_prints_every_key_without_running(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["job=mine", "--cfg", "job", "sampling.seed=7"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mode: run\n")
    assert "  seed: 7\n" in printed
    assert "  path: missing.parquet\n" in printed


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["--help"])
    assert caught.value.code == 0
    assert "75  interrupted" in capsys.readouterr().out


def test_a_refused_job_leaves_no_folder_behind(here: Path) -> None:  # trap 50
    assert command_line.main(["job=mine", "sampling.top_p=2"]) == 2
    assert [path.name for path in here.iterdir()] == ["jobs"]


def test_a_missing_input_is_refused_before_any_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing.parquet" in refused(["job=mine"], capsys)
    assert not (here / "out").exists()


def test_the_hub_kernels_package_is_refused_before_transformers_is_imported(here: Path) -> None:
    folder = here / "site" / "kernels-0.18.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    ended = run_in(here, ["job=mine"], path=[here / "site", CHECKOUT])
    assert ended.returncode == 2
    assert "pip uninstall kernels" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("key", 1, "2"), 2),
        (UnusableEnvironmentError("clash"), 2),
        (SourceError("no column"), 2),
        (LedgerError("unreadable"), 2),
        (FingerprintError.__new__(FingerprintError), 2),
        (ShardBusyError.__new__(ShardBusyError), 4),
        (StorageError.__new__(StorageError), 74),
        (ValueError("a fault of ours"), 1),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    error: Exception, code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_line._exit_code(error) == code


def test_an_unexpected_failure_keeps_its_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # trap 51
    def fail(config: object) -> int:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", fail)
    assert command_line.main(["job=mine"]) == 1
    assert "ValueError: a fault of ours" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_75(
    number: signal.Signals, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object) -> int:
        os.kill(os.getpid(), number)
        time.sleep(60)
        return 0

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    before = signal.getsignal(number)
    assert command_line.main(["job=mine"]) == 75
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("replaced", [RuntimeError("config is broken"), ConfigError("key", 1, "2"), SystemExit(3)])
def test_a_signal_ends_the_command_with_75_also_where_code_replaces_the_interruption(
    replaced: BaseException, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except BaseException as error:
            raise replaced from error
        return 0

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    assert command_line.main(["job=mine"]) == 75
    said = capsys.readouterr().err
    assert said.endswith("runner: interrupted; the same command goes on from here\n")
    assert "Traceback" not in said


def test_a_signal_that_code_swallows_stops_the_job_before_its_first_rows(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: object) -> int:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        with stoppable() as stop:
            assert stop
            raise Interrupted

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    assert command_line.main(["job=mine"]) == 75


def test_a_second_signal_while_the_first_is_answered_changes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    def answer(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    monkeypatch.setattr(command_line, "say", answer)
    assert command_line.main(["job=mine"]) == 75


def test_failing_storage_is_told_also_after_a_signal(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        raise StorageError(Path("out"), OSError(28, "No space left on device"))

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    assert command_line.main(["job=mine"]) == 74
    assert "No space left" in capsys.readouterr().err


def test_an_interrupted_restart_says_how_to_go_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object) -> int:
        with open_ledger(here / "out", restart=True):
            raise Interrupted

    monkeypatch.setattr(importlib.import_module("runner.job"), "run", run)
    assert command_line.main(["job=mine"]) == 75
    said = capsys.readouterr().err
    assert "runner: interrupted; run the same command without resume=restart to go on" in said


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_leaves_no_traceback(here: Path) -> None:
    codes = set()
    for delay in range(7):
        process = subprocess.Popen(
            [sys.executable, "-m", "runner", "job=mine"],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.1 + delay * 0.25)
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
        codes.add(process.returncode)
        assert process.returncode in (75, 2, -signal.SIGTERM), said
        assert "Traceback" not in said
    assert 75 in codes


def run_in(folder: Path, arguments: list[str], path: list[Path]) -> subprocess.CompletedProcess[str]:
    """`python -m runner` in a folder, with these import paths."""
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )
