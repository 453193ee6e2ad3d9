"""When a model folder counts as the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.model_identity import model_identity
from tests.tiny_models import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, tokenizer=True)
    return tmp_path


def test_other_weights_of_the_same_shape_are_another_model(folder: Path) -> None:
    # trap 46
    before = model_identity(folder)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    weights = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    assert path.stat().st_size == size
    after = model_identity(folder)
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_changed_config_or_tokenizer_is_another_model(folder: Path, name: str) -> None:
    # trap 46
    before = model_identity(folder)
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace(" ", "\t", 1))
    assert {each for each in before if before[each] != model_identity(folder)[each]} == {name}


def test_a_model_card_does_not_count_and_a_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    before = model_identity(folder)
    (folder / "README.md").write_text("about")
    (folder / ".hidden.json").write_text("{}")
    assert model_identity(folder) == before


def test_files_smaller_than_a_sample_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    before = model_identity(tmp_path)
    path.write_bytes(b"abd")
    assert model_identity(tmp_path) != before
