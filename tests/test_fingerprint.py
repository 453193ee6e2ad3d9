"""Two runs compared by their facts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner.fingerprint import FORMAT_VERSION, Fingerprint, FingerprintError
from runner.records import LedgerError
from runner.storage import write_json

FACTS = {"model": {"path": "tiny", "files": ["a", "b"]}, "sampling": {"stop": ["\n"], "seed": 7}}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The run file of a run with FACTS."""
    path = tmp_path / "run.json"
    write_json(path, Fingerprint(FACTS).as_json({"torch": "2"}))
    return path


def refused(path: Path, facts: dict[str, Any]) -> FingerprintError:
    with pytest.raises(FingerprintError) as caught:
        Fingerprint(facts).check(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_the_same_facts_in_another_order_and_as_tuples_are_the_same_run(recorded: Path) -> None:
    other = {"sampling": {"seed": 7, "stop": ("\n",)}, "model": {"files": ("a", "b"), "path": "tiny"}}
    Fingerprint(other).check(recorded)
    assert Fingerprint(other).digest == Fingerprint(FACTS).digest


def test_library_versions_are_recorded_and_make_no_difference(recorded: Path) -> None:
    write_json(recorded, Fingerprint(FACTS).as_json({"torch": "3", "numpy": "2"}))
    Fingerprint(FACTS).check(recorded)
    assert Fingerprint(FACTS).as_json({"torch": "3"})["versions"] == {"torch": "3"}


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"model": {"path": "tiny", "files": ["a", "c"]}}, "model.files[1]", "was 'b' when .* and is 'c' now"),
        ({"model": {"path": "tiny", "files": ["a"]}}, "model.files", r"was \['a', 'b'\] .* is \['a'\] now"),
        ({"model": {"path": "tiny"}}, "model.files", "is absent now"),
        ({"input": 3}, "input", "was absent when .* is 3 now"),
        ({"model": None}, "model", "is null now"),
    ],
)
def test_what_changed_is_named_with_both_values(recorded: Path, change: dict[str, Any], key: str, words: str) -> None:
    # trap 46
    error = refused(recorded, FACTS | change)
    assert error.key == key
    assert ("model.path" if key.startswith("model.files") else f"Set {key} back") in str(error)
    with pytest.raises(FingerprintError, match=words):
        raise error
    assert Fingerprint(FACTS | change).digest != Fingerprint(FACTS).digest


def test_a_long_value_is_shown_in_part(recorded: Path) -> None:
    message = str(refused(recorded, FACTS | {"model": "x" * 5000}))
    assert "xxx…" in message
    assert len(message) < 600


def test_a_folder_of_another_format_is_refused_not_misread(recorded: Path) -> None:
    write_json(recorded, Fingerprint(FACTS).as_json({}) | {"format_version": FORMAT_VERSION + 1})
    assert refused(recorded, FACTS).key == "format_version"


def test_a_damaged_run_file_is_an_error_of_the_ledger(recorded: Path) -> None:
    # trap 47
    recorded.write_bytes(recorded.read_bytes()[:-3])
    with pytest.raises(LedgerError, match="unreadable"):
        Fingerprint(FACTS).check(recorded)


def test_two_long_texts_are_shown_where_they_differ(recorded: Path) -> None:
    long = "the same beginning " * 20
    write_json(recorded, Fingerprint({"prompt": long + "Label:"}).as_json({}))
    message = str(refused(recorded, {"prompt": long + "Label:Rating:"}))
    assert "Label:'" in message
    assert "Label:Rating:'" in message
    assert len(message) < 600


def test_a_changed_column_names_the_keys_that_make_columns(recorded: Path) -> None:
    write_json(recorded, Fingerprint({"columns": {"row_id": "int64"}}).as_json({}))
    assert "sink.keep_columns" in str(refused(recorded, {"columns": {"row_id": "int64", "text": "string"}}))


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ([{"path": "/a/in.parquet", "rows": 5, "sha256": "2"}], r"/a/in\.parquet \(5 rows\) now"),
        (
            [{"path": "/b.parquet", "rows": 5}, {"path": "/c.parquet", "rows": 0}],
            r"/b\.parquet and 1 more \(5 rows\) now",
        ),
        ([], r"no file \(5 rows\) now"),
    ],
)
def test_another_input_is_named_with_its_rows_and_no_key_that_cannot_be_set(
    recorded: Path, files: list[dict[str, Any]], shown: str
) -> None:
    source = {"format": "parquet", "rows": 3, "files": [{"path": "/a/in.parquet", "rows": 3, "sha256": "1"}], "skip": 0}
    write_json(recorded, Fingerprint({"source": source}).as_json({}))
    message = str(refused(recorded, {"source": source | {"rows": 5, "files": files}}))
    assert re.search(r"it was /a/in\.parquet \(3 rows\) when .*" + shown, message)
    assert "sha256" not in message
    assert "resume=restart" in message
    assert "Set source.skip back" in str(refused(recorded, {"source": source | {"skip": 1}}))


def test_another_split_of_a_dataset_is_named(recorded: Path) -> None:
    source = {"path": "some/data", "split": "train", "rows": 3, "fingerprint": "1", "files": []}
    write_json(recorded, Fingerprint({"source": source}).as_json({}))
    message = str(refused(recorded, {"source": source | {"split": "test", "fingerprint": "2"}}))
    assert "some/data, split train (3 rows)" in message
    assert "some/data, split test (3 rows)" in message


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"id_column": None}, {"id_column": "key"}, "source.id_column was null .* Set source.id_column back"),
        (
            {"model": {"max_model_len": 8}},
            {"model": {"max_model_len": 9}},
            "engine.max_model_len was 8 .* Set engine.max",
        ),
        ({"model": {"tokenizer": {"a.json": "1"}}}, {"model": {"tokenizer": {"a.json": "2"}}}, "(model.tokenizer)"),
    ],
)
def test_a_fact_is_named_by_the_key_that_sets_it(
    recorded: Path, before: dict[str, Any], after: dict[str, Any], words: str
) -> None:
    write_json(recorded, Fingerprint(before).as_json({}))
    assert re.search(words, str(refused(recorded, after)))
