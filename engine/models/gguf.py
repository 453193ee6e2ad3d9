"""GGUF files, converted once into a model folder that everything else can read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from engine.models.config import ModelError
from engine.models.rope import inverse_frequencies

CONVERTER_VERSION = 1  # raise it when the converter writes something else: old folders are then not used
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp stores Mistral as llama
_ROPE_FACTORS = "rope_freqs.weight"
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODEL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")

FloatArray = npt.NDArray[np.float32]


def gguf_to_folder(path: Path, cache_root: Path | None = None) -> Path:
    """The model folder made from a GGUF file, converted on the first call only.

    It holds config.json, generation_config.json, the tokenizer with the file's chat template, and
    model.safetensors in float32, and lies in `cache_root` (by default `pagebatch/gguf` in the user's
    cache folder) under a name made from the file's path, size and time of change. It appears there whole
    or not at all, also when several processes convert the same file. Raises ModelError for a file that is
    missing, broken, split, or of an architecture other than llama, qwen2 and qwen3.
    """
    path = path.resolve()
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    root = cache_root or _user_cache() / "pagebatch" / "gguf"
    target = root / _cache_key(path)
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        _convert(_GgufFile.open(path), work)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _cache_key(path: Path) -> str:
    stat = path.stat()
    text = "\n".join((str(path), str(stat.st_size), str(stat.st_mtime_ns), str(CONVERTER_VERSION)))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _publish(work: Path, target: Path) -> None:
    """Make a finished folder durable, then visible under its name in one step."""
    for file in work.iterdir():
        _sync(file)
    _sync(work)
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same content
            raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _GgufFile:
    """An open GGUF file of an accepted architecture."""

    path: Path
    architecture: str
    fields: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> _GgufFile:
        try:
            reader = GGUFReader(path)
            # A reader's fields and tensors are views into the mapped file; only tensors stay so.
            fields = {name: reader.fields[name].contents() for name in reader.fields}
        # The reader has no error of its own: a broken file ends in whatever its array code raises.
        except Exception as error:
            raise ModelError(f"{path}: not a whole GGUF file ({error})") from error
        architecture = fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: GGUF architecture {architecture!r} is not supported; accepted are {', '.join(_ARCHITECTURES)}"
            )
        if fields.get("split.count", 1) > 1:
            raise ModelError(f"{path}: one part of a split GGUF; merge the parts with llama-gguf-split --merge")
        return cls(path, architecture, fields, {tensor.name: tensor for tensor in reader.tensors})

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own metadata."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: metadata {self.architecture}.{key} is missing")
        return value


def _convert(source: _GgufFile, folder: Path) -> None:
    config = _transformers_config(source)
    config.save_pretrained(folder)
    generation = {"eos_token_id": _end_token_ids(source)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", _model_tensors(source, config))
    if "tokenizer.ggml.model" in source.fields:
        _write_tokenizer(source, folder)


def _write_tokenizer(source: _GgufFile, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    # Said again from the file: transformers before 5.24 gives the end token another id and cleans up spaces.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.chat_template = source.fields.get("tokenizer.chat_template")
    for token, key in _SPECIAL_TOKENS.items():
        if f"tokenizer.ggml.{key}" in source.fields:
            setattr(tokenizer, token, source.fields["tokenizer.ggml.tokens"][source.fields[f"tokenizer.ggml.{key}"]])
    tokenizer.save_pretrained(folder)


def _end_token_ids(source: _GgufFile) -> list[int]:
    """End of text, of turn and of message: each ends an answer where the file names it."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return sorted({int(source.fields[key]) for key in keys if key in source.fields})


def _transformers_config(source: _GgufFile) -> PreTrainedConfig:
    if source.get("expert_count", 0):
        raise ModelError(f"{source.path}: models with experts are not supported")
    heads, hidden = source.need("attention.head_count"), source.need("embedding_length")
    head_dim = source.get("attention.key_length", hidden // heads)
    if {source.get("attention.value_length", head_dim), source.get("rope.dimension_count", head_dim)} != {head_dim}:
        raise ModelError(f"{source.path}: key, value and rotary widths of a head differ; they must be equal")
    window = source.get("attention.sliding_window")
    if window and source.architecture != "llama":
        raise ModelError(f"{source.path}: a sliding window is supported for llama files only")
    values: dict[str, Any] = {
        "vocab_size": _shape(_tensor(source, "token_embd.weight"))[0],
        "hidden_size": hidden,
        "intermediate_size": source.need("feed_forward_length"),
        "num_hidden_layers": source.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.need("context_length"),
        "rms_norm_eps": source.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "bos_token_id": source.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_token_ids(source) or None,
        "rope_parameters": _rope_parameters(source),
        "dtype": "float32",
    }
    family = source.architecture
    if window:
        family, values["sliding_window"] = "mistral", window
    elif family != "qwen2":  # where the biases follow from the family
        values["attention_bias"] = "blk.0.attn_q.bias" in source.tensors
    try:
        config = AutoConfig.for_model(family, **values)
    # transformers validates in many places, each with exceptions of its own.
    except Exception as error:
        raise ModelError(f"{source.path}: transformers does not accept its metadata: {error}") from error
    return _with_llama3_rope(source, config)


def _rope_parameters(source: _GgufFile) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": float(source.get("rope.freq_base", 10000.0)), "rope_type": "default"}
    scaling = source.get("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        parameters |= {"rope_type": scaling, "factor": float(source.need("rope.scaling.factor"))}
    elif scaling != "none":
        raise ModelError(f"{source.path}: rope scaling {scaling!r} is not supported; accepted are none, linear, yarn")
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = source.need("rope.scaling.original_context_length")
    return parameters


def _with_llama3_rope(source: _GgufFile, config: PreTrainedConfig) -> PreTrainedConfig:
    """Put llama3 scaling into the config where the file has it.

    A GGUF keeps the factor of each frequency in place of the parameters it was made from. All published
    Llama 3 models differ in `factor` alone, which is the largest entry; the rest is checked.
    """
    if _ROPE_FACTORS not in source.tensors:
        return config
    stored = _values(source.tensors[_ROPE_FACTORS])
    plain, _ = inverse_frequencies(config, config.head_dim)
    config.rope_parameters |= {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = inverse_frequencies(config, config.head_dim)
    if stored.shape != scaled.shape or not np.allclose(plain / scaled, stored, rtol=1e-3):
        raise ModelError(f"{source.path}: {_ROPE_FACTORS} are not the factors of a Llama 3 model; only those are known")
    return config


def _tensor(source: _GgufFile, name: str) -> ReaderTensor:
    if name not in source.tensors:
        raise ModelError(f"{source.path}: tensor {name} is missing")
    return source.tensors[name]


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Rows first, as in torch; GGUF counts dimensions from the innermost."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _values(tensor: ReaderTensor) -> FloatArray:
    return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


@dataclass(frozen=True)
class _NewTensor:
    """A tensor to be written: its shape now, its values when its turn comes."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], FloatArray]


def _model_tensors(source: _GgufFile, config: PreTrainedConfig) -> Iterator[_NewTensor]:
    for name, tensor in source.tensors.items():
        if name == _ROPE_FACTORS:
            continue

        def values(name: str = name, tensor: ReaderTensor = tensor) -> FloatArray:
            return _unpermuted(name, _values(tensor), source.architecture, config)

        yield _NewTensor(_transformers_name(name, source.path), _shape(tensor), values)


def _transformers_name(name: str, path: Path) -> str:
    if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _MODEL_TENSOR.fullmatch(name)) and match[1] in _MODEL_NAMES:
        return f"{_MODEL_NAMES[match[1]]}.{match[2]}"
    raise ModelError(f"{path}: tensor {name} is no part of an accepted architecture")


def _unpermuted(name: str, values: FloatArray, architecture: str, config: PreTrainedConfig) -> FloatArray:
    """Rows of q and k in transformers' order.

    llama.cpp's llama rotates neighbouring elements, so its files interleave the two halves of each head;
    the Qwen architectures rotate halves, as transformers does, and are stored as they are.
    """
    match = _LAYER_TENSOR.fullmatch(name)
    if architecture != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return values
    heads = config.num_attention_heads if match[2] == "attn_q" else config.num_key_value_heads
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _write_safetensors(path: Path, tensors: Iterator[_NewTensor]) -> None:
    """Write float32 tensors one by one; safetensors' own writer wants all of them in memory.

    Format: https://github.com/huggingface/safetensors#format
    """
    entries = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + 4 * int(np.prod(entry.shape, dtype=np.int64))
        header[entry.name] = {"dtype": "F32", "shape": entry.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin on an 8-byte boundary
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for entry in entries:
            file.write(entry.values().astype("<f4", copy=False).tobytes())
