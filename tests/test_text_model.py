"""Folder, config and tokenizer of a model, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelError
from runner.config import ConfigError, ModelSection
from runner.text_model import TextModel, open_model
from tests.tiny_models import tiny_config, tiny_tokenizer
from tests.tiny_tokenizer import byte_level_tokenizer


def write_model(folder: Path, *, tokenizer: bool = True, **config: object) -> Path:
    """A model folder without weights."""
    tiny_config("llama", **config).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def opened(folder: Path, **keys: Any) -> TextModel:
    return open_model(ModelSection(path=str(folder), **keys))


def test_end_tokens_are_those_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    # trap 29
    write_model(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 12]}))
    assert opened(tmp_path).end_token_ids == (7, 12, 257)


def test_without_any_end_token_there_is_none(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=None)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    assert opened(tmp_path).end_token_ids == ()


@pytest.mark.parametrize(("vocab_size", "limit"), [(320, 260), (260, 260), (200, 200)])
def test_only_ids_that_model_and_tokenizer_both_have_are_drawn(tmp_path: Path, vocab_size: int, limit: int) -> None:
    # trap 26
    assert opened(write_model(tmp_path, vocab_size=vocab_size)).vocab_limit == limit


def test_decoded_text_leaves_special_tokens_out_and_nothing_else(tmp_path: Path) -> None:
    # trap 32
    model = opened(write_model(tmp_path))
    text = "naïve  café , 😀 do n't ."
    ids = tiny_tokenizer()(text)["input_ids"]
    assert model.decode([256, *ids, 258, 257]) == text
    cut = tiny_tokenizer()("x😀")["input_ids"][:-1]
    assert model.decode(cut) == "x\ufffd"
    assert model.decode([]) == ""


def test_a_model_without_a_tokenizer_works_in_ids(tmp_path: Path) -> None:
    model = opened(write_model(tmp_path, tokenizer=False))
    assert model.tokenizer is None
    assert (model.vocab_limit, model.end_token_ids) == (320, (257,))
    with pytest.raises(ValueError, match="no tokenizer"):
        model.decode([1])


def test_the_tokenizer_that_the_job_names_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    own, other = write_model(tmp_path / "model"), tmp_path / "other"
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(other)
    model = opened(own, tokenizer=str(other))
    assert model.decode(tokenizer("the fox")["input_ids"]) == "the fox"
    assert tokenizer.eos_token_id in model.end_token_ids
    assert model.folder == own


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened(Path("~/model")).folder == tmp_path / "model"


def test_a_path_that_is_no_model_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for path, accepted in ((tmp_path / "nothing", "that exists"), (tmp_path / "weights.bin", r"ends in \.gguf")):
        with pytest.raises(ConfigError, match=rf"model\.path: '{path}'; accepted: .*{accepted}"):
            opened(path)
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        opened(tmp_path)


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer"])
def test_a_tokenizer_that_cannot_be_read_is_refused_under_the_key_that_named_it(tmp_path: Path, key: str) -> None:
    broken = tmp_path / "broken"
    write_model(tmp_path / "model", tokenizer=False)
    write_model(broken)
    (broken / "tokenizer.json").write_text("{")
    section = {
        "model.path": ModelSection(path=str(broken)),
        "model.tokenizer": ModelSection(path=str(tmp_path / "model"), tokenizer=str(broken)),
    }[key]
    with pytest.raises(ConfigError, match="a folder with a tokenizer that transformers can read") as caught:
        open_model(section)
    assert (caught.value.key, caught.value.value) == (key, str(broken))
