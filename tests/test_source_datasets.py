"""Hugging Face datasets as a stream of batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import pytest

from runner.config import ConfigError
from runner.source import SourceError
from tests.source_rows import BIG_ID, open_path, read, texts, write_lines


@pytest.fixture
def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"text": [f"row {row}" for row in range(10)], "id": [BIG_ID, None, *range(8)], "tags": [[{"a": 1}]] * 10}
    )


def test_a_saved_dataset_is_read_exactly(tmp_path: Path, rows: datasets.Dataset) -> None:
    rows.select([9, *range(9)]).save_to_disk(tmp_path / "saved")
    source = open_path(tmp_path / "saved")
    assert source.num_rows == 10
    assert read(source, "text", skip=1, limit=2) == [(1, {"text": "row 0"}), (2, {"text": "row 1"})]
    assert [row["id"] for _, row in read(source, "id", limit=3)] == [7, BIG_ID, None]  # trap 55
    assert source.fingerprint() == open_path(tmp_path / "saved").fingerprint()
    json.dumps(source.fingerprint())


def test_a_dataset_of_splits_needs_a_split(tmp_path: Path, rows: datasets.Dataset) -> None:
    datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(tmp_path / "saved")
    assert texts(open_path(tmp_path / "saved", split="test")) == ["row 3"]
    for split in (None, "dev"):
        with pytest.raises(ConfigError, match=r"source\.split.*train, test"):
            open_path(tmp_path / "saved", split=split)


def test_a_folder_is_loaded_by_datasets_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", {"text": "loaded"})
    source = open_path(tmp_path / "data", format="dataset", split="train")
    assert texts(source) == ["loaded"]
    assert source.fingerprint() == open_path(tmp_path / "data", format="dataset", split="train").fingerprint()


def test_a_name_that_nothing_has_says_what_was_tried() -> None:
    for path in ("nobody/has-this", "hf://datasets/nobody/has-this"):
        with pytest.raises(
            SourceError, match=r"not an existing file or folder, and datasets\.load_dataset\('nobody/has-this'\)"
        ):
            open_path(path)


@pytest.mark.parametrize("path", ["data/reviws", "data/x.parquet", "other/reviews.csv", "reviews.jsonl.zst", "x.txt"])
def test_a_path_that_means_a_file_is_not_looked_for_on_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(SourceError, match="no such file or folder"):
        open_path(path)


@pytest.mark.parametrize("path", ["imdb", "nobody/has-v1.1"])
def test_a_name_that_may_be_one_of_the_hub_is_said_before_it_is_looked_for(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def load_dataset(name: str, revision: str | None) -> None:
        assert f"{path!r} is no file or folder" in capsys.readouterr().err
        raise OSError("not reached")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(SourceError, match="not reached"):
        open_path(path)


def test_a_damaged_saved_dataset_is_refused(tmp_path: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.arrow"):
        shutil.copyfile(tmp_path / "saved" / "state.json", file)
    with pytest.raises(SourceError, match="not a readable saved dataset"):
        open_path(tmp_path / "saved")


@pytest.mark.parametrize("record", ["{", "[]", "{}", "null", '{"_data_files": 3}', '{"_data_files": [{}]}', "\udcff"])
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_a_damaged_record_of_a_saved_dataset_is_refused(
    tmp_path: Path, rows: datasets.Dataset, name: str, record: str
) -> None:
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / name).write_text(record, errors="surrogateescape")
    if name == "dataset_info.json" and "{" in record and record != "{":
        assert open_path(tmp_path / "saved").num_rows == 10  # the features are in the data as well
        return
    with pytest.raises(SourceError, match="not a readable"):
        open_path(tmp_path / "saved")


def test_a_damaged_record_of_splits_is_refused(tmp_path: Path, rows: datasets.Dataset) -> None:
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    for record in ("{", "{}", '{"splits": 3}', '{"splits": ["absent"]}'):
        (tmp_path / "saved" / "dataset_dict.json").write_text(record)
        with pytest.raises(SourceError, match="not a readable"):
            open_path(tmp_path / "saved")


def test_the_only_split_needs_no_name(tmp_path: Path, rows: datasets.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    assert texts(open_path(tmp_path / "saved")) == texts(open_path(tmp_path / "saved", split="train"))
    with pytest.raises(ConfigError, match=r"source\.split: 'test'.*train"):
        open_path(tmp_path / "saved", split="test")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "data.jsonl", {"text": "loaded"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data.jsonl").rename(tmp_path / "data" / "train.jsonl")
    assert texts(open_path(tmp_path / "data", format="dataset")) == ["loaded"]


def test_a_saved_dataset_without_rows_is_a_source(tmp_path: Path, rows: datasets.Dataset) -> None:  # trap 54
    features = rows.features
    datasets.Dataset.from_dict({name: [] for name in features}, features=features).save_to_disk(tmp_path / "made")
    rows.filter(lambda row: False).save_to_disk(tmp_path / "filtered")
    empty = datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    datasets.DatasetDict({"train": rows, "test": empty}).save_to_disk(tmp_path / "splits")
    for name, split in (("made", None), ("filtered", None), ("splits", "test")):
        source = open_path(tmp_path / name, split=split)
        assert source.num_rows == 0
        assert source.schema == open_path(tmp_path / "splits", split="train").schema
        assert read(source, "text", "id") == []
        assert source.fingerprint() == open_path(tmp_path / name, split=split).fingerprint()


def test_values_edited_in_place_change_the_fingerprint(tmp_path: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(tmp_path / "saved")
    before = open_path(tmp_path / "saved").fingerprint()
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"row 3row 4", b"row 4row 3"))
    after = open_path(tmp_path / "saved").fingerprint()
    assert after["fingerprint"] == before["fingerprint"]
    assert after != before


def test_a_dataset_that_changes_after_it_was_opened_is_refused(tmp_path: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    source = open_path(tmp_path / "saved")
    file.unlink()
    with pytest.raises(SourceError, match=r"\.arrow: gone"):
        texts(source)
    rows.select([3, 2, 1]).save_to_disk(tmp_path / "other")
    (other,) = (tmp_path / "other").glob("*.arrow")
    other.rename(file)
    with pytest.raises(SourceError, match=r"\.arrow: changed"):
        texts(source)
