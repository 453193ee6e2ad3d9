"""What a model folder says about its model, checked before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from engine.models.rope import inverse_frequencies, rope_limit

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


class ModelError(ValueError):
    """A model that cannot be used; the message says which file, what is wrong, and what is accepted."""


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The mixture of experts that every sparse layer has.

    Each token goes to the `experts_per_token` most probable of `num_experts` MLPs, which have an inner size
    of `intermediate_size`; `normalised` tells that their probabilities are scaled to sum to 1.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of an accepted family.

    `layer_windows` has one entry a layer: the number of keys a query sees (its own included), or None
    for all of them. `sparse_layers` has one too: whether the MLP is a mixture of `experts`, which is None
    if no layer has one; `intermediate_size` is that of the other layers. `max_position` is the largest
    total length, in tokens, that is computed rightly. `end_token_ids` are those of config.json and
    generation_config.json, ascending. `hf` is the transformers config that everything else was read from.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    layer_windows: tuple[int | None, ...]
    sparse_layers: tuple[bool, ...]
    experts: ExpertConfig | None
    max_position: int
    end_token_ids: tuple[int, ...]
    hf: PreTrainedConfig = field(compare=False, repr=False)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, which is that of all value heads."""
        return self.num_kv_heads * self.head_dim


def read_model_config(folder: Path, trust_remote_code: bool = False) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json; weights are not needed.

    Raises ModelError for a missing or unreadable file, another family than FAMILIES, a quantised
    checkpoint, or a feature of the family that the decoder does not compute.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type {family!r} is not supported; accepted are {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantised checkpoints are not supported; use unquantised weights or a .gguf file")
    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # transformers validates in many places, each with exceptions of its own.
    except Exception as error:
        raise ModelError(f"{path}: transformers cannot read it: {error}") from error
    end_token_ids = _end_token_ids(folder, raw)
    try:
        return _from_transformers(hf, family, end_token_ids)
    # A value of the wrong kind or a missing key, which transformers let pass, shows in many ways.
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _from_transformers(hf: PreTrainedConfig, family: str, end_token_ids: tuple[int, ...]) -> ModelConfig:
    for name in _SIZES:
        _positive(hf, name)
    attention_bias = family in ("llama", "qwen3", "qwen3_moe") and hf.attention_bias
    sparse_layers = _sparse_layers(hf, family)
    config = ModelConfig(
        family=family,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and hf.mlp_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        hidden_act=hf.hidden_act,
        layer_windows=_layer_windows(hf, family),
        sparse_layers=sparse_layers,
        experts=_experts(hf, family) if any(sparse_layers) else None,
        max_position=rope_limit(hf),
        end_token_ids=end_token_ids,
        hf=hf,
    )
    if config.head_dim < 1:
        raise ValueError(f"head_dim {config.head_dim} must be a positive integer, or null for hidden size / heads")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; accepted is silu")
    if any(window is not None and window < 1 for window in config.layer_windows):
        raise ValueError(f"sliding_window {hf.sliding_window} must be 1 or more, or null for none")
    inverse_frequencies(hf, config.head_dim)  # whatever is wrong with them shows here
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _positive(hf: PreTrainedConfig, name: str) -> int:
    value = getattr(hf, name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} {value!r} must be a positive integer")
    return value


def _sparse_layers(hf: PreTrainedConfig, family: str) -> tuple[bool, ...]:
    """The layers with experts, as transformers' model of the family chooses them."""
    layers: int = hf.num_hidden_layers
    if family != "qwen3_moe":
        return (family == "mixtral",) * layers
    step = _positive(hf, "decoder_sparse_step")
    if hf.num_experts < 1:
        return (False,) * layers
    return tuple(layer not in hf.mlp_only_layers and (layer + 1) % step == 0 for layer in range(layers))


def _experts(hf: PreTrainedConfig, family: str) -> ExpertConfig:
    mixtral = family == "mixtral"
    experts = ExpertConfig(
        num_experts=_positive(hf, "num_local_experts" if mixtral else "num_experts"),
        experts_per_token=_positive(hf, "num_experts_per_tok"),
        intermediate_size=_positive(hf, "intermediate_size" if mixtral else "moe_intermediate_size"),
        normalised=mixtral or hf.norm_topk_prob,
    )
    if experts.experts_per_token > experts.num_experts:
        raise ValueError(
            f"num_experts_per_tok {experts.experts_per_token} is more than the {experts.num_experts} experts there are"
        )
    return experts


def _layer_windows(hf: PreTrainedConfig, family: str) -> tuple[int | None, ...]:
    """The window of each layer, as transformers' model of the family applies it."""
    layers: int = hf.num_hidden_layers
    if family == "llama":
        return (None,) * layers
    if family in ("mistral", "mixtral", "qwen3_moe"):  # one window for all layers, whatever layer_types says
        return (hf.sliding_window,) * layers
    # transformers has already turned use_sliding_window and max_window_layers into layer_types.
    if len(hf.layer_types) != layers:
        raise ValueError(f"layer_types has {len(hf.layer_types)} entries for {layers} layers")
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    unknown = sorted(set(hf.layer_types) - set(windows))
    if unknown:
        raise ValueError(f"layer_types {', '.join(unknown)} not supported; accepted are {', '.join(windows)}")
    if "sliding_attention" in hf.layer_types and hf.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(windows[kind] for kind in hf.layer_types)


def _end_token_ids(folder: Path, raw_config: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens that the files name themselves.

    transformers' config classes fill in a default (2 for Llama), which need not be an end token of
    this model's vocabulary, so the JSON is read and not the config object.
    """
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids: set[int] = set()
    for source, values in ((folder / "config.json", raw_config), (path, generation)):
        value = values.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in listed):
            raise ModelError(f"{source}: eos_token_id {value!r} is neither an integer nor a list of integers")
        ids.update(listed)
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder needs one") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return value
