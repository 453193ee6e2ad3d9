"""The dense decoder of all accepted families, over a paged K/V cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding, rotate
from kernels.attention import AttentionBatch, paged_attention
from kernels.kv_write import write_kv

if TYPE_CHECKING:
    from engine.kv_cache import KVCache


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias; unlike torch.nn.Linear it leaves its memory unset for the loader to fill."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = _parameter(outputs, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) over the last dimension, float32 inside."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-head attention of one layer; queries, keys and values come from one product."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.sizes = [config.q_size, config.kv_size, config.kv_size]
        self.window = config.layer_windows[layer]
        self.scale = config.head_dim**-0.5
        self.qkv_proj = Linear(config.hidden_size, sum(self.sizes), config.qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(config.q_size, config.hidden_size, config.o_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, batch: AttentionBatch, slot_mapping: Tensor
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values into the cache."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden).split(self.sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key_cache, value_cache = cache.layer(self.layer)
        # All writes come before the first read: a sequence may read a block that another one fills in this step.
        write_kv(key, value, key_cache, value_cache, slot_mapping)
        mixed = paged_attention(query, key_cache, value_cache, batch, scale=self.scale, sliding_window=self.window)
        return self.o_proj(mixed.flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, batch: AttentionBatch, slot_mapping: Tensor
    ) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin, cache, batch, slot_mapping)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """Token ids to hidden states to logits, in the order of operations of transformers' models.

    Parameters are left unset: `engine.models.loader.load_decoder` fills them. They take no gradient.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.hf, config.head_dim, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, batch: AttentionBatch, slot_mapping: Tensor
    ) -> Tensor:
        """One step over the tokens of all its sequences, laid end to end.

        `token_ids`, `positions` and `slot_mapping` are int64 [tokens]; `batch` says which tokens are whose.
        Writes every token's keys and values into its slot of `cache`. Returns [tokens, hidden].
        """
        hidden = F.embedding(token_ids, self.embed_tokens)
        cos, sin = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, cache, batch, slot_mapping)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]; the product itself is in the model's dtype."""
        return F.linear(hidden, self.lm_head).float()
