"""Small random transformers models for tests, saved as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
_SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def tiny_config(family: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """A transformers config with small sizes; any config key may be overridden.

    By default: 4 query and 2 K/V heads of 32 (so head_dim is not hidden size / heads), 3 layers, Mistral
    with a window of 12 tokens, Qwen with full attention. `sliding_window=w` turns windows on for Qwen from
    layer 1 on, for Qwen3-MoE in all. Mixtral and Qwen3-MoE have 6 experts, 2 of them a token's; layer 1
    of Qwen3-MoE is dense.
    """
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        values["sliding_window"] = 12
    if family == "mixtral":
        values |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        values |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        }
    if family.startswith("qwen") and overrides.get("sliding_window") is not None:
        values |= {"use_sliding_window": True, "max_window_layers": 1}
    return _CONFIGS[family](**(values | overrides))


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 transformers model in eval mode; every weight, norm and bias is random.

    transformers' own initialisation leaves norms at 1, biases at 0 and attention almost uniform, which
    would hide a missing bias or a wrong position.
    """
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **overrides), dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return model.eval()


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte (ids 0 to 255) and four special tokens (256 to 259)."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tokenizer: bool = False,
    chat: bool = True,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> PreTrainedModel:
    """Save `tiny_model` into `folder`, a `tiny_tokenizer` beside it if asked, and return the model."""
    model = tiny_model(family, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer(chat=chat).save_pretrained(folder)
    return model
