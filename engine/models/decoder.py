"""The decoder of all accepted families, over a paged K/V cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.layers import MLP, Linear, NormedLinear, RMSNorm, parameter
from engine.models.moe import SparseMLP
from engine.models.rope import RotaryEmbedding
from kernels.attention import AttentionBatch, paged_attention
from kernels.kv_write import HeadNorms, rotate_and_write_kv

if TYPE_CHECKING:
    from engine.kv_cache import KVCache


class Attention(nn.Module):
    """Grouped-head attention of one layer over the normed tokens; queries, keys and values are one product."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = [config.q_size, config.kv_size, config.kv_size]
        self.window = config.layer_windows[layer]
        self.scale = config.head_dim**-0.5
        self.qkv_proj = NormedLinear(
            config.hidden_size, sum(self.sizes), config.qkv_bias, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.o_proj = Linear(config.q_size, config.hidden_size, config.o_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.head_norms: HeadNorms | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.head_norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, batch: AttentionBatch, slot_mapping: Tensor
    ) -> None:
        """Add to the residual stream `hidden` [tokens, hidden] in place; write the tokens' keys and values."""
        key_cache, value_cache = cache.layer(self.layer)
        qkv, epilogue = self.qkv_proj(hidden)
        # All writes come before the first read: a sequence may read a block that another one fills in this step.
        query = rotate_and_write_kv(
            qkv, cos, sin, key_cache, value_cache, slot_mapping, norms=self.head_norms, epilogue=epilogue
        )
        mixed = paged_attention(query, key_cache, value_cache, batch, scale=self.scale, sliding_window=self.window)
        self.o_proj.add_to(hidden, mixed.flatten(-2))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and beside a residual."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp: MLP | SparseMLP
        if config.sparse_layers[layer]:
            self.mlp = SparseMLP(config, dtype=dtype, device=device)
        else:
            self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        slot_mapping: Tensor,
        counts: Tensor,
    ) -> None:
        """Add to the residual stream `hidden` [tokens, hidden] in place; write the tokens' keys and values.

        `counts` int32 [experts] are zeros, for the routing of a sparse MLP.
        """
        self.attention(hidden, cos, sin, cache, batch, slot_mapping)
        if isinstance(self.mlp, SparseMLP):
            self.mlp(hidden, slot_mapping, counts)
        else:
            self.mlp(hidden)


class Decoder(nn.Module):
    """Embedded tokens to hidden states to logits.

    Parameters are left unset: `engine.models.loader.load_decoder` fills them. They take no gradient.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.num_experts = config.experts.num_experts if config.experts else 0
        self.embed_tokens = parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.hf, config.head_dim, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )

    def fold_norms(self) -> None:
        """Once, after loading: multiply the weights of deferred norms into the projections that follow them."""
        for module in self.modules():
            if isinstance(module, NormedLinear):
                module.fold_norm()

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        slot_mapping: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """One step over the tokens of all its sequences, laid end to end.

        Writes every token's keys and values into its slot of `cache`.

        Args:
            hidden: [tokens, hidden], the rows of `embed_tokens` that are the tokens'; overwritten.
            positions: int32 or int64 [tokens].
            cache: in the dtype of the model.
            batch: which tokens are whose.
            slot_mapping: int64 [tokens]. A token with a negative slot is padding: it writes nowhere.
            out: [tokens, hidden] for the result; None: a new tensor.

        Returns:
            [tokens, hidden] in the dtype of the model.
        """
        cos, sin = self.rotary(positions, hidden.dtype)
        counts = torch.zeros(len(self.layers), self.num_experts, dtype=torch.int32, device=hidden.device)
        for layer, layer_counts in zip(self.layers, counts, strict=True):
            layer(hidden, cos, sin, cache, batch, slot_mapping, layer_counts)
        return self.norm(hidden, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], both in the dtype of the model."""
        return F.linear(hidden, self.lm_head)
