"""What a path names: files, folders, globs and URLs, and what every source promises."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from runner.config import ConfigError
from runner.source import SourceError
from tests.source_rows import open_path, texts, write_lines, write_parquet


def test_an_unknown_kind_of_file_names_the_accepted_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    for path in (tmp_path / "a.csv", tmp_path, tmp_path / "*.csv"):
        with pytest.raises(SourceError, match=r"accepted are \.parquet.*\.jsonl"):
            open_path(path)


def test_the_format_key_overrides_the_suffix(tmp_path: Path) -> None:
    assert texts(open_path(write_lines(tmp_path / "a.txt", {"text": "x"}), format="jsonl")) == ["x"]
    assert texts(open_path(write_parquet(tmp_path / "a.data", {"text": ["x"]}), format="parquet")) == ["x"]


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "a.parquet", "no such file"), (tmp_path / "*.parquet", "no files matched")):
        with pytest.raises(SourceError, match=message):
            open_path(path)
    with pytest.raises(SourceError, match="no files matched"):
        open_path(tmp_path)


def test_mixed_formats_are_refused_unless_one_is_chosen(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": ["parquet"]})
    write_lines(tmp_path / "b.jsonl", {"text": "jsonl"})
    with pytest.raises(SourceError, match="mixes formats"):
        open_path(tmp_path)
    assert texts(open_path(tmp_path, format="jsonl")) == ["jsonl"]


def test_a_missing_id_column_and_a_split_of_files_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    with pytest.raises(ConfigError, match=r"source\.id_column: 'key'.*text"):
        open_path(path, id_column="key")
    with pytest.raises(ConfigError, match=r"source\.split"):
        open_path(path, split="train")


def test_urls_are_read_through_fsspec(tmp_path: Path) -> None:
    local = write_parquet(tmp_path / "a.parquet", {"text": ["over a url"]})
    with fsspec.open("memory://inputs/a.parquet", "wb") as stream:
        stream.write(local.read_bytes())
    with fsspec.open("memory://inputs/_b.parquet", "wb") as stream:
        stream.write(b"hidden")
    for path in ("memory://inputs/a.parquet", "memory://inputs", "memory://inputs/*.parquet", f"file://{local}"):
        assert texts(open_path(path)) == ["over a url"]


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(SourceError, match="nosuch"):
        open_path("nosuch://bucket/a.parquet")


def test_a_folder_reads_in_order_of_names_and_skips_hidden_ones(tmp_path: Path) -> None:  # trap 48
    for number in range(12):
        write_parquet(tmp_path / f"part-{number:05d}.parquet", {"text": [f"padded {number}"]})
        write_parquet(tmp_path / "plain" / f"part-{number}.parquet", {"text": [f"plain {number}"]})
    for hidden in (".part-00000.parquet", "_part-00001.parquet"):
        (tmp_path / hidden).write_bytes(b"half written")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.md").touch()
    assert texts(open_path(tmp_path)) == [f"padded {number}" for number in range(12)]
    assert texts(open_path(tmp_path / "part-*.parquet")) == [f"padded {number}" for number in range(12)]
    assert texts(open_path(tmp_path / "plain")) == [f"plain {number}" for number in range(12)]


def test_zero_rows_are_a_valid_source(tmp_path: Path) -> None:  # trap 54
    write_parquet(tmp_path / "a.parquet", pa.table({"text": pa.array([], pa.string())}))
    (tmp_path / "a.jsonl").touch()
    for name in ("a.parquet", "a.jsonl"):
        source = open_path(tmp_path / name, id_column="text")
        assert source.num_rows == 0
        assert list(source.batches(["text"], 0, None)) == []
        json.dumps(source.fingerprint())


def test_the_fingerprint_changes_with_the_content(tmp_path: Path) -> None:
    def prints() -> list[dict[str, Any]]:
        return [open_path(tmp_path / name).fingerprint() for name in ("a.parquet", "a.jsonl")]

    write_parquet(tmp_path / "a.parquet", {"text": ["one"]})
    write_lines(tmp_path / "a.jsonl", {"text": "one"})
    before = prints()
    assert json.loads(json.dumps(before)) == before == prints()
    write_parquet(tmp_path / "a.parquet", {"text": ["two"]})
    write_lines(tmp_path / "a.jsonl", {"text": "two"})
    assert all(old != new for old, new in zip(before, prints(), strict=True))


def test_a_file_of_a_url_that_changes_is_refused_and_one_copied_is_the_same(tmp_path: Path) -> None:
    local = write_parquet(tmp_path / "a.parquet", {"text": ["one", "two"]}, compression="none")
    data = local.read_bytes()

    def put(content: bytes) -> None:
        with fsspec.open("memory://changing/a.parquet", "wb") as stream:
            stream.write(content)

    put(data)
    source = open_path("memory://changing/a.parquet")
    put(data)
    assert texts(source) == ["one", "two"]
    put(data.replace(b"one", b"owe", 1))
    with pytest.raises(SourceError, match="changed while"):
        texts(source)
    fsspec.filesystem("memory").rm("/changing/a.parquet")
    with pytest.raises(SourceError, match="gone"):
        texts(source)


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/in\xff.jsonl"
    try:
        with open(name, "wb") as stream:
            stream.write(b'{"text": "x"}\n')
    except OSError:
        pytest.skip("this file system has no such names")
    for path in (os.fsdecode(name), tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(SourceError, match="is not UTF-8; rename it"):
            open_path(path)
