from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GPT2Config

from engine.models.config import FAMILIES, ExpertConfig, ModelError, read_model_config
from tests.tiny_models import tiny_config


def _saved(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    tiny_config(family, **overrides).save_pretrained(folder)
    return folder


def _edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_read_from_config_json_alone(tmp_path: Path, family: str) -> None:
    config = read_model_config(_saved(tmp_path, family, vocab_size=321))
    assert config.family == family
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.q_size, config.kv_size) == (128, 64)
    assert config.vocab_size == 321
    assert config.qk_norm == (family in ("qwen3", "qwen3_moe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_dim_defaults_to_transformers_rule(tmp_path: Path, family: str) -> None:
    _saved(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "head_dim"}))
    assert read_model_config(tmp_path).head_dim == (128 if family == "qwen3" else 16)


@pytest.mark.parametrize(
    ("family", "overrides", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("qwen3_moe", {}, (False, False, False)),
        ("qwen3_moe", {"attention_bias": True}, (True, True, False)),
        ("mixtral", {}, (False, False, False)),
    ],
)
def test_biases_follow_family_and_config(
    tmp_path: Path, family: str, overrides: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = read_model_config(_saved(tmp_path, family, **overrides))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


# trap 24: the layers that have a window
@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 5}, (5, 5, 5)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mixtral", {"sliding_window": 5}, (5, 5, 5)),
        ("mixtral", {}, (None, None, None)),
        ("qwen3_moe", {"sliding_window": 5}, (5, 5, 5)),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": False}, (None, None, None)),
        ("qwen2", {"sliding_window": 5}, (None, 5, 5)),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 2}, (None, None, 5)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False}, (None, None, None)),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 0}, (5, 5, 5)),
        (
            "qwen3",
            {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (5, None, None),
        ),
    ],
)
def test_windows_by_layer(
    tmp_path: Path, family: str, overrides: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_model_config(_saved(tmp_path, family, **overrides)).layer_windows == windows


@pytest.mark.parametrize(
    ("family", "overrides", "sparse"),
    [
        ("llama", {}, (False, False, False)),
        ("mixtral", {}, (True, True, True)),
        ("qwen3_moe", {"mlp_only_layers": []}, (True, True, True)),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, (False, True, False)),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, (False, True, False)),
        ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False)),
        ("qwen3_moe", {"num_experts": 0}, (False, False, False)),
    ],
)
def test_sparse_layers_are_those_of_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], sparse: tuple[bool, ...]
) -> None:
    config = read_model_config(_saved(tmp_path, family, **overrides))
    assert config.sparse_layers == sparse
    assert (config.experts is not None) == any(sparse)
    mlps = [layer.mlp for layer in AutoModelForCausalLM.from_config(config.hf).model.layers]
    assert tuple(hasattr(mlp, "experts") for mlp in mlps) == sparse


@pytest.mark.parametrize(
    ("family", "overrides", "experts"),
    [
        ("mixtral", {}, ExpertConfig(6, 2, 96, True)),
        ("qwen3_moe", {}, ExpertConfig(6, 2, 48, True)),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 6}, ExpertConfig(6, 6, 48, False)),
    ],
)
def test_experts_by_family(tmp_path: Path, family: str, overrides: dict[str, Any], experts: ExpertConfig) -> None:
    assert read_model_config(_saved(tmp_path, family, **overrides)).experts == experts


# Checkpoints of the hub call it num_experts, what transformers 5 saves num_local_experts.
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_under_either_name(tmp_path: Path, key: str) -> None:
    path = _saved(tmp_path, "qwen3_moe") / "config.json"
    values = json.loads(path.read_text())
    values = {name: value for name, value in values.items() if name not in ("num_experts", "num_local_experts")}
    path.write_text(json.dumps(values | {key: 4}))
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    assert experts.num_experts == 4


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts 0 must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok 0 must be a positive integer"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size 0 must be a positive integer"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0 must be a positive integer"),
    ],
)
def test_impossible_experts_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    _edit(_saved(tmp_path, family) / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


# trap 29
@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, 7, (2, 7)),
        ([9, 2], [2, 7], (2, 7, 9)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_are_united(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    _edit(_saved(tmp_path) / "config.json", eos_token_id=in_config)
    _edit(tmp_path / "generation_config.json", eos_token_id=in_generation)
    assert read_model_config(tmp_path).end_token_ids == expected


def test_an_end_token_that_no_file_names_is_not_made_up(tmp_path: Path) -> None:
    path = _saved(tmp_path) / "config.json"
    path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "eos_token_id"}))
    config = read_model_config(tmp_path)
    assert config.hf.eos_token_id == 2  # the default of transformers' class
    assert config.end_token_ids == ()


@pytest.mark.parametrize("value", ["</s>", [2, "x"], True])
def test_end_tokens_of_a_wrong_type_are_refused(tmp_path: Path, value: Any) -> None:
    _edit(_saved(tmp_path) / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        read_model_config(tmp_path)


def test_another_family_is_refused_by_name_with_the_accepted_ones(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"config\.json: model_type 'gpt2' .* llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"
    ):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral'.*yarn"),
        ({"hidden_size": "wide"}, "transformers cannot read it"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _edit(_saved(tmp_path) / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _edit(_saved(tmp_path, "qwen3") / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff\xfe"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 must be a positive integer"),
        ({"head_dim": -32}, "head_dim -32 must be a positive integer"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "config.json"),
    ],
)
def test_values_that_transformers_lets_pass_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    _edit(_saved(tmp_path) / "config.json", **changes)
    with pytest.raises(ModelError, match=words):
        read_model_config(tmp_path)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(tmp_path: Path, window: int) -> None:
    # trap 24
    _edit(_saved(tmp_path, "mistral") / "config.json", sliding_window=window)
    with pytest.raises(ModelError, match=f"sliding_window {window} must be 1 or more"):
        read_model_config(tmp_path)


def test_yarn_extends_a_limit_that_the_config_states_unscaled(tmp_path: Path) -> None:
    # trap 27
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    assert read_model_config(_saved(tmp_path, rope_parameters=yarn)).max_position == 2048
    scaled = _saved(tmp_path, rope_parameters=yarn, max_position_embeddings=4096)
    assert read_model_config(scaled).max_position == 4096
