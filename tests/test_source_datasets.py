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


def test_a_damaged_saved_dataset_is_refused(tmp_path: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.arrow"):
        shutil.copyfile(tmp_path / "saved" / "state.json", file)
    with pytest.raises(SourceError, match="not a readable saved dataset"):
        open_path(tmp_path / "saved")
