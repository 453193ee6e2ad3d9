import contextlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.fingerprint import FORMAT_VERSION, FingerprintError
from runner.ledger import WITHOUT_RESTART
from runner.output_schema import completion_schema
from runner.records import LedgerError
from runner.shard_lock import ShardBusyError
from tests.output_rows import (
    FINGERPRINT,
    SCHEMA,
    commit_rows,
    open_ledger,
    publish_rows,
    read_folder,
    row_ids_of,
)


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def test_a_new_folder_is_created_with_its_fingerprint(tmp_path):
    out = tmp_path / "new" / "out"
    with open_ledger(out) as ledger:
        assert ledger.attempt == 1
        assert not ledger.is_complete
        assert ledger.committed_rows().tolist() == []
    run = json.loads((out / "run.json").read_text())
    assert run["model"] == FINGERPRINT["model"]
    assert run["format_version"] == FORMAT_VERSION
    assert run["versions"] == {"torch": "2"}
    assert run["columns"]["row_id"] == "int64"


def test_committed_rows_are_known_at_the_next_start(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [5, 1])
        commit_rows(ledger, [3])
    with open_ledger(tmp_path) as ledger:
        assert ledger.attempt == 2
        assert ledger.next_part == 2
        assert ledger.committed_rows().tolist() == [1, 3, 5]
        assert ledger.totals.rows == 3
        assert ledger.totals.output_tokens == 9


def test_attempts_are_counted_by_what_they_committed(tmp_path):
    for expected in (1, 2, 3):
        with open_ledger(tmp_path) as ledger:
            assert ledger.attempt == expected
            commit_rows(ledger, [expected])
    open_ledger(tmp_path).close()
    with open_ledger(tmp_path) as ledger:
        assert ledger.attempt == 4


def test_files_that_no_record_names_are_removed_at_the_next_start(tmp_path):  # trap 45
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
    kept = files(tmp_path)
    orphans = [
        "_parts/shard-00000-part-00001.parquet",
        "_parts/shard-00000-stats-00001.parquet",
        "_parts/.shard-00000-part-00002.parquet.tmp",
        "_commits/.shard-00000-part-00001.json.tmp",
        "completions/.shard-00000-part-00000.parquet.tmp",
    ]
    others = [
        "_parts/shard-00001-part-00000.parquet",
        "_parts/notes.txt",
        "completions/.shard-00001-part-00000.parquet.tmp",
    ]
    (tmp_path / "completions").mkdir()
    for name in orphans + others:
        (tmp_path / name).write_bytes(b"half a file")
    with open_ledger(tmp_path) as ledger:
        assert ledger.committed_rows().tolist() == [0]
    assert files(tmp_path) == kept | {*others}


def hold_lock(out: Path, held: "multiprocessing.synchronize.Event", done: "multiprocessing.synchronize.Event") -> None:
    with open_ledger(out):
        held.set()
        done.wait(60)


def test_a_second_process_is_refused_and_the_lock_ends_with_its_holder(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    holder = context.Process(target=hold_lock, args=(tmp_path, held, done))
    holder.start()
    assert held.wait(60)
    with pytest.raises(ShardBusyError, match=f"process {holder.pid} "):
        open_ledger(tmp_path)
    assert holder.pid is not None
    os.kill(holder.pid, 9)
    holder.join()
    open_ledger(tmp_path).close()


def test_a_failed_start_releases_the_lock(tmp_path):
    open_ledger(tmp_path).close()
    for _ in range(2):
        with pytest.raises(FingerprintError):
            open_ledger(tmp_path, {**FINGERPRINT, "model": {}})
    open_ledger(tmp_path).close()


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"model": {"path": "tiny", "weights": "def"}}, "model.weights", ["'abc'", "'def'"]),
        ({"prompt": {"column": "text", "system": "be brief"}}, "prompt.system", ["absent", "'be brief'"]),
        ({"sampling": {"temperature": 0.8, "stop": ["\n"]}}, "sampling.temperature", ["0.0", "0.8"]),
        ({"sampling": {"temperature": 0.0, "stop": []}}, "sampling.stop", ["\\n", "[]"]),
        ({"input": {"files": [{"path": "a.parquet", "rows": 13}]}}, "input.files[0].rows", ["12", "13"]),
    ],
)
def test_a_changed_model_prompt_sampling_or_input_is_refused_by_name(tmp_path, change, key, values):  # trap 46
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
    before = files(tmp_path)
    with pytest.raises(FingerprintError) as caught:
        open_ledger(tmp_path, {**FINGERPRINT, **change})
    assert caught.value.key == key
    for text in [*values, "resume=restart", "sink.path"]:
        assert text in str(caught.value)
    assert files(tmp_path) == before


def test_changed_output_columns_are_refused(tmp_path):
    open_ledger(tmp_path).close()
    with pytest.raises(FingerprintError, match=r"columns\.token_ids"):
        open_ledger(tmp_path, schema=completion_schema(id_field=None, kept=[], token_ids=True, prompt=False))


def test_other_library_versions_and_equal_values_of_other_python_types_are_the_same_run(tmp_path):
    open_ledger(tmp_path).close()
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "versions": {"torch": "1"}}))
    with open_ledger(tmp_path, {**FINGERPRINT, "sampling": {"stop": ("\n",), "temperature": 0}}) as ledger:
        assert ledger.attempt == 1


DAMAGE = [b"", b"{", b"[]", b"\xff\xfe", b'{"attempt": 1}', b"null"]


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "_commits/shard-00000-part-00000.json"])
def test_an_unreadable_record_is_an_error_and_never_a_fresh_start(tmp_path, name, content):  # trap 47
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
    (tmp_path / name).write_bytes(content)
    before = files(tmp_path)
    for _ in range(2):
        with pytest.raises((LedgerError, FingerprintError), match=f"{name}.*resume=restart"):
            open_ledger(tmp_path)
    assert files(tmp_path) == before


@pytest.mark.parametrize("content", DAMAGE)
def test_an_unreadable_publish_record_is_an_error(tmp_path, content):  # trap 47
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
        publish_rows(ledger, 1)
    (tmp_path / "_commits" / "shard-00000.json").write_bytes(content)
    with pytest.raises(LedgerError, match=r"shard-00000\.json.*resume=restart"):
        open_ledger(tmp_path)
    assert row_ids_of(tmp_path / "completions") == [0]


@pytest.mark.parametrize("lost", ["run.json", "_commits/shard-00000.json"])
def test_a_lost_record_beside_published_rows_is_an_error(tmp_path, lost):  # trap 47
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
        publish_rows(ledger, 1)
    (tmp_path / lost).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        open_ledger(tmp_path)
    assert row_ids_of(tmp_path / "completions") == [0]


@pytest.mark.parametrize("name", ["shard-00000-part-00000.parquet", "shard-00000-stats-00000.parquet"])
def test_a_committed_file_that_is_missing_or_cut_short_is_an_error(tmp_path, name):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
    path = tmp_path / "_parts" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(LedgerError, match=f"{name} has {len(content) - 1} bytes instead of {len(content)}"):
        open_ledger(tmp_path)
    path.unlink()
    with pytest.raises(LedgerError, match=f"{name} is missing"):
        open_ledger(tmp_path)


def test_a_published_file_that_is_missing_is_an_error(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
        publish_rows(ledger, 1)
    (tmp_path / "completions" / "shard-00000-part-00000.parquet").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        open_ledger(tmp_path)


def test_a_record_of_another_run_is_an_error(tmp_path):
    with open_ledger(tmp_path / "a", {**FINGERPRINT, "model": {}}) as ledger:
        commit_rows(ledger, [0])
    with open_ledger(tmp_path / "b") as ledger:
        commit_rows(ledger, [0])
    record = "_commits/shard-00000-part-00000.json"
    (tmp_path / "b" / record).write_bytes((tmp_path / "a" / record).read_bytes())
    with pytest.raises(LedgerError, match="different run"):
        open_ledger(tmp_path / "b")


def test_restart_discards_a_shard_in_any_state_and_takes_the_new_run(tmp_path):
    new = {**FINGERPRINT, "model": {"path": "other"}}
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0, 1])
        publish_rows(ledger, 2)
    with open_ledger(tmp_path, new, restart=True) as ledger:
        assert (ledger.attempt, ledger.next_part, ledger.is_complete) == (1, 0, False)
        commit_rows(ledger, [7])
    assert files(tmp_path) == {
        "run.json",
        "_commits/shard-00000.lock",
        "_commits/shard-00000-part-00000.json",
        "_parts/shard-00000-part-00000.parquet",
        "_parts/shard-00000-stats-00000.parquet",
    }
    (tmp_path / "run.json").write_text("damaged")
    with open_ledger(tmp_path, restart=True) as ledger:
        commit_rows(ledger, [9])
        publish_rows(ledger, 1)
    assert row_ids_of(tmp_path / "completions") == [9]


def test_restart_says_what_it_discards(tmp_path, capsys):
    with open_ledger(tmp_path, restart=True) as ledger:
        assert capsys.readouterr().err == "", "there is nothing yet"
        commit_rows(ledger, [0, 1])
    with open_ledger(tmp_path, restart=True) as ledger:
        assert "discards the 2 committed rows in" in capsys.readouterr().err
        commit_rows(ledger, [0, 1, 2])
        publish_rows(ledger, 3)
    (tmp_path / "_commits" / "shard-00000-part-00000.json").write_text("left over")
    with open_ledger(tmp_path, restart=True) as ledger:
        assert "discards the complete output of 3 rows in" in capsys.readouterr().err
        commit_rows(ledger, [0])
    (tmp_path / "_commits" / "shard-00000-part-00000.json").write_text("damaged")
    with open_ledger(tmp_path, restart=True):
        assert "discards the earlier output in" in capsys.readouterr().err


def test_an_error_after_a_restart_says_that_restarting_again_discards(tmp_path):
    for restart in (True, False):
        with pytest.raises(KeyboardInterrupt) as caught, open_ledger(tmp_path, restart=restart):
            raise KeyboardInterrupt
        assert getattr(caught.value, "__notes__", []) == ([WITHOUT_RESTART] if restart else [])
    ended = KeyboardInterrupt()
    with contextlib.suppress(KeyboardInterrupt), open_ledger(tmp_path, restart=True) as ledger:
        publish_rows(ledger, 0)
        raise ended
    assert not hasattr(ended, "__notes__"), "what is complete is not discarded by going on"


@pytest.fixture
def readable() -> Iterator[Path]:
    """An output folder that a process without privileges reaches, unlike those in `tmp_path`."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder / "out"
    for path in (folder / "out", *(folder / "out").rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


def opened_without_writing(out: Path, **more: bool) -> tuple[str, int]:
    """What a child that may only read the folder gets on opening it: the error's name, and rows if complete."""
    for path in (out, *out.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_open_as_nobody, args=(out, sender, more))
    child.start()
    answer = receiver.recv()
    child.join()
    return answer


def _open_as_nobody(out: Path, sender: "multiprocessing.connection.Connection", more: dict[str, bool]) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        with open_ledger(out, **more) as ledger:
            sender.send(("", ledger.totals.rows if ledger.is_complete else -1))
    except Exception as error:
        sender.send((type(error).__name__, -1))


def test_a_complete_shard_may_lie_where_nothing_can_be_written(readable):
    with open_ledger(readable) as ledger:
        commit_rows(ledger, [0, 1])
        publish_rows(ledger, 2)
    (readable / "_parts").rmdir()
    assert opened_without_writing(readable) == ("", 2)
    assert opened_without_writing(readable, restart=True) == ("StorageError", -1)


def test_an_unfinished_shard_where_nothing_can_be_written_is_an_error(readable):
    with open_ledger(readable) as ledger:
        commit_rows(ledger, [0, 1])
    assert opened_without_writing(readable) == ("StorageError", -1)


def test_a_reader_of_a_complete_shard_keeps_off_a_process_that_runs_it(readable):
    with open_ledger(readable) as ledger:
        publish_rows(ledger, 0)
        assert opened_without_writing(readable) == ("ShardBusyError", -1)


def test_a_complete_shard_is_left_as_it_is(tmp_path):  # trap 45
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [1, 0])
        publish_rows(ledger, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    with open_ledger(tmp_path) as ledger:
        assert ledger.is_complete
        assert ledger.committed_rows().tolist() == [0, 1]
        assert ledger.totals.rows == 2
        publish_rows(ledger, 2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")} == before


def test_a_reader_of_the_whole_output_folder_sees_only_published_files(tmp_path):  # trap 48
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0])
        (tmp_path / "completions").mkdir()
        (tmp_path / "completions" / ".shard-00000-part-00000.parquet.tmp").write_bytes(b"half")
        assert read_folder(tmp_path / "completions").num_rows == 0
        publish_rows(ledger, 1)
    assert read_folder(tmp_path / "completions").schema == SCHEMA
