"""Causal attention of a step's query tokens over paged keys and values."""

from __future__ import annotations

from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.attention_torch import paged_attention_torch

__all__ = ["AttentionBatch", "check_supported", "paged_attention"]

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head sizes that the GPU kernels are tested with."""
CPU_HEAD_DIMS = (8, 16, 32, *HEAD_DIMS)
MAX_GROUP = 16
"""Query heads of a key/value head: the rows of the smallest tensor core product, into which a decode packs them."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Powers of two, so that a tile of keys holds whole blocks or lies in one."""


def check_supported(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, *, device_type: str = "cuda"
) -> None:
    """Refuse head counts, head sizes and block sizes that `paged_attention` is not made for.

    Raises:
        ValueError: what was given and what would be accepted.
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} key/value heads: "
            "the number of query heads must be a multiple of the number of key/value heads"
        )
    if num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"{num_heads // num_kv_heads} query heads for each key/value head: 1 to {MAX_GROUP} are supported"
        )
    accepted = CPU_HEAD_DIMS if device_type == "cpu" else HEAD_DIMS
    if head_dim not in accepted:
        raise ValueError(f"head_dim {head_dim} on {device_type}: supported are {_listed(accepted)}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size}: supported are {_listed(BLOCK_SIZES)}")


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention output of every query token, [tokens, heads, head_dim] in the dtype of `query`.

    A query sees the keys of its sequence up to its own position; with a `sliding_window` only the last
    `sliding_window` of them, its own included. Slots beyond a sequence's context reach no output, whatever
    they hold. Keys and values of the context must be finite: a masked weight of 0 times NaN is NaN, also in
    the outputs of queries before it. CUDA tensors are computed by Triton kernels, CPU tensors by torch.

    Args:
        query: [tokens, heads, head_dim], at least `batch.query_start[-1]` tokens; the outputs of further ones are not
            defined. The stride over tokens is free.
        key_cache: [num_blocks, block_size, kv_heads, head_dim], in the dtype of `query`. Keys of the
            step's own tokens are already written.
        value_cache: as `key_cache`.
        batch: the layout of the tokens. Its tensors may change between the replays of a captured graph, but not
            between calls outside of one; each graph needs a batch of its own.
        scale: positive factor of the scores before the softmax.
        sliding_window: at least 1, or None for all keys.

    Raises:
        ValueError: on a GPU, a tensor whose layout the kernels cannot read, or a scale that is not positive.
    """
    if query.is_cuda:
        from kernels.attention_triton import paged_attention_triton  # Triton is not there without a GPU platform.

        return paged_attention_triton(query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window)
    return paged_attention_torch(query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
