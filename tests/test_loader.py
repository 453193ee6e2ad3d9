from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.loader import HEAD, LoadError, checkpoint_slots, load_decoder
from engine.models.moe import SparseMLP
from tests.folded_weights import folded
from tests.tiny_models import FAMILIES, save_tiny_model, tiny_config

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def _load(folder: Path, dtype: torch.dtype = torch.float32, dummy: bool = False) -> Decoder:
    return load_decoder(folder, read_model_config(folder), dtype=dtype, device=CPU, dummy=dummy)


def _change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_place(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    stored = load_file(tmp_path / WEIGHTS)  # transformers' state_dict holds experts under names of its own
    decoder = _load(tmp_path)
    slots = checkpoint_slots(decoder)
    assert slots.keys() == stored.keys()
    assert all(torch.equal(slots[name], tensor) for name, tensor in folded(stored).items())
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not decoder.training


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_cover_every_parameter_once(tmp_path: Path, family: str, tied: bool) -> None:
    tiny_config(family, tie_word_embeddings=tied).save_pretrained(tmp_path)
    decoder = _load(tmp_path, dummy=True)
    slots = checkpoint_slots(decoder)
    if tied:
        del slots[HEAD]
    for slot in slots.values():
        slot.fill_(0)
    for slot in slots.values():
        slot.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in decoder.parameters())


def test_a_sharded_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "whole")
    save_tiny_model(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = (checkpoint_slots(_load(tmp_path / name)) for name in ("whole", "sharded"))
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_weights_are_converted_to_the_asked_dtype_before_norms_are_folded(tmp_path: Path) -> None:
    stored = save_tiny_model(tmp_path).state_dict()
    slots = checkpoint_slots(_load(tmp_path, torch.bfloat16))
    assert all(torch.equal(slots[name], tensor) for name, tensor in folded(stored, torch.bfloat16).items())


def test_float16_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    stored = save_tiny_model(tmp_path).state_dict()
    slots = checkpoint_slots(_load(tmp_path, torch.float16))
    assert all(torch.equal(slots[name], tensor.half()) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("family", "prefix", "names"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.3", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3", ("w1", "w3", "w2")),
    ],
)
def test_an_expert_holds_its_gate_before_up(
    tmp_path: Path, family: str, prefix: str, names: tuple[str, str, str]
) -> None:
    model = save_tiny_model(tmp_path, family)
    experts = model.model.layers[2].mlp.experts
    mlp = _load(tmp_path).layers[2].mlp
    assert isinstance(mlp, SparseMLP)
    assert torch.equal(mlp.gate_up, experts.gate_up_proj)
    assert torch.equal(mlp.down, experts.down_proj)
    gate, up, down = (load_file(tmp_path / WEIGHTS)[f"{prefix}.{name}.weight"] for name in names)
    assert torch.equal(mlp.gate_up[3], torch.cat((gate, up)))
    assert torch.equal(mlp.down[3], down)


# trap 25
def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    _change(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(LoadError, match=f"{name} is missing"):
        _load(tmp_path)


# trap 25
@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
def test_a_tied_head_loads_under_either_name_or_both(tmp_path: Path, kept: str) -> None:
    embedding = save_tiny_model(tmp_path, tie_word_embeddings=True).state_dict()[EMBEDDING]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if kept != "both":
            del tensors[HEAD if kept == "embedding" else EMBEDDING]

    _change(tmp_path, change)
    decoder = _load(tmp_path)
    assert decoder.lm_head is decoder.embed_tokens
    assert torch.equal(decoder.embed_tokens, embedding)


# trap 25
def test_a_stored_head_that_differs_from_its_tied_embedding_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tie_word_embeddings=True)
    _change(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(LoadError, match=r"lm_head\.weight differs from .* tie_word_embeddings"):
        _load(tmp_path)


# trap 25
def test_an_untied_model_without_a_stored_head_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    _change(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        _load(tmp_path)


# trap 25
def test_missing_and_unused_tensors_are_listed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({"model.layers.1.extra.weight": tensors.pop(Q_PROJ)}))
    with pytest.raises(LoadError, match=f"{Q_PROJ} is missing; model.layers.1.extra.weight is no part of the model"):
        _load(tmp_path)


# trap 25
def test_a_bias_that_the_config_does_not_name_is_not_dropped(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, attention_bias=True)
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"self_attn\.q_proj\.bias is no part of the model"):
        _load(tmp_path)


def test_saved_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    expected = _load(tmp_path).rotary.frequencies
    _change(tmp_path, lambda tensors: tensors.update({name: torch.ones(16)}))
    assert torch.equal(_load(tmp_path).rotary.frequencies, expected)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({Q_PROJ: torch.ones(5, 64)}))
    with pytest.raises(LoadError, match=rf"{Q_PROJ} has shape \[5, 64\], the model needs \[128, 64\]"):
        _load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({Q_PROJ: torch.ones(128, 64, dtype=torch.int8)}))
    with pytest.raises(LoadError, match=f"{Q_PROJ} has dtype I8, accepted are"):
        _load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="50KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(LoadError, match=f"is stored twice, in {first.name} and in {second.name}"):
        _load(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        _load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="50KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(LoadError, match=f"index.json names files that are not there: {shard.name}"):
        _load(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"index\.json: not a safetensors index"):
        _load(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"model\.safetensors: not a whole safetensors file"):
        _load(tmp_path)


def test_dummy_weights_need_no_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    tiny_config("qwen3", initializer_range=0.5).save_pretrained(tmp_path)
    first, second = _load(tmp_path, torch.bfloat16, dummy=True), _load(tmp_path, torch.bfloat16, dummy=True)
    for (name, ours), again in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, again)
        if "norm" in name:
            assert bool((ours == 1).all())
        else:
            assert float(ours.float().std()) == pytest.approx(0.5, rel=0.1)


def test_an_index_entry_without_its_tensor_is_missing(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="50KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][Q_PROJ]
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors, shard)
    with pytest.raises(LoadError, match=f"{Q_PROJ} is missing"):
        _load(tmp_path)


@pytest.mark.parametrize("index", ['{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}', "{}", "no"])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: str) -> None:
    save_tiny_model(tmp_path)
    config = read_model_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        load_decoder(tmp_path, config, dtype=torch.float32, device=torch.device("cpu"))
