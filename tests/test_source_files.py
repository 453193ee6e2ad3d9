"""Which files a path names, and in which order."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from runner.source_batch import SourceError
from runner.source_files import PlaceKind, format_of, locate


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(path: Path | str, file_format: str = "auto") -> list[str]:
    """The files of a path, by their last folder and name."""
    return ["/".join(Path(file.path).parts[-2:]) for file in locate(str(path)).files(file_format)[1]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("b/a.PQ", "parquet"),
        ("a.parq", "parquet"),
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.json.bz2", "jsonl"),
        ("A.JSONL.GZ", "jsonl"),
        ("a.jsonl.xz", "jsonl"),
        ("a.parquet.gz", None),
        ("a.jsonl.zip", None),
        ("a.csv", None),
        ("parquet", None),
        ("a.gz", None),
    ],
)
def test_the_format_goes_by_the_end_of_the_name(name: str, kind: str | None) -> None:
    assert format_of(name) == kind


def test_numbers_in_names_count_by_value_in_files_and_folders(tmp_path: Path) -> None:
    # trap 48
    touch(tmp_path, "run-10/part-2.jsonl", "run-9/part-10.jsonl", "run-9/part-9.jsonl", "run-10/part-1.jsonl")
    assert names(tmp_path / "*" / "*.jsonl") == [
        "run-9/part-9.jsonl",
        "run-9/part-10.jsonl",
        "run-10/part-1.jsonl",
        "run-10/part-2.jsonl",
    ]


def test_names_that_begin_with_numbers_letters_or_equal_numbers_have_one_order(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "2.jsonl", "10.jsonl", "a01.jsonl", "a1.jsonl", "a2.jsonl", "02.jsonl")
    found = [name.rpartition("/")[2] for name in names(tmp_path)]
    assert found == ["02.jsonl", "2.jsonl", "10.jsonl", "a01.jsonl", "a1.jsonl", "a2.jsonl", "b.jsonl"]


def test_hidden_files_and_folders_are_not_matched_but_may_be_spelled_out(tmp_path: Path) -> None:
    # trap 48
    touch(tmp_path, "in/a.jsonl", "in/.b.jsonl", "in/_c.jsonl", "in/_tmp/d.jsonl", "in/sub/e.jsonl", ".cache/f.jsonl")
    assert names(tmp_path / "in") == ["in/a.jsonl"]
    assert names(tmp_path / "in" / "*.jsonl") == ["in/a.jsonl"]
    assert names(tmp_path / "in" / "**" / "*.jsonl") == ["in/a.jsonl", "sub/e.jsonl"]
    assert names(tmp_path / "in" / "_c.jsonl") == ["in/_c.jsonl"]
    assert names(tmp_path / ".cache" / "*.jsonl") == [".cache/f.jsonl"]
    assert names(tmp_path / ".cache") == [".cache/f.jsonl"]


def test_a_name_that_looks_like_a_pattern_is_the_file_if_there_is_one(tmp_path: Path) -> None:
    touch(tmp_path, "a[1].jsonl", "a1.jsonl", "b1.jsonl")
    assert locate(str(tmp_path / "a[1].jsonl")).kind is PlaceKind.FILE
    assert [Path(name).name for name in names(tmp_path / "a[1].jsonl")] == ["a[1].jsonl"]
    assert [Path(name).name for name in names(tmp_path / "b[1].jsonl")] == ["b1.jsonl"]


def test_only_files_of_the_wanted_kind_are_taken_from_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.jsonl", "notes.txt")
    (tmp_path / "folder.jsonl").mkdir()
    place = locate(str(tmp_path))
    assert place.kind is PlaceKind.FOLDER
    for kind, name in (("parquet", "a.parquet"), ("jsonl", "b.jsonl")):
        found_kind, files = place.files(kind)
        assert (found_kind, [Path(file.path).name for file in files]) == (kind, [name])


def test_a_path_that_names_nothing_is_missing_and_has_no_files(tmp_path: Path) -> None:
    place = locate(str(tmp_path / "nothing.jsonl"))
    assert place.kind is PlaceKind.MISSING
    with pytest.raises(SourceError, match=r"nothing\.jsonl' does not exist"):
        place.files("auto")


def test_a_file_knows_its_size_and_opens_packed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"lines"))
    (file,) = locate(str(path)).files("auto")[1]
    assert file.is_local
    assert file.size == path.stat().st_size
    with file.open(decompress=True) as stream:
        assert stream.read() == b"lines"
    with file.open() as stream:
        assert stream.read() == path.read_bytes()


@pytest.mark.parametrize("mark", ["dataset_dict.json", "state.json"])
def test_a_folder_that_datasets_saved_is_known_by_its_mark(tmp_path: Path, mark: str) -> None:
    assert not locate(str(tmp_path)).is_saved_dataset
    touch(tmp_path, mark)
    assert locate(str(tmp_path)).is_saved_dataset
    assert locate(f"{tmp_path}/").is_saved_dataset
    assert not locate(str(tmp_path / mark)).is_saved_dataset
