"""Paged attention on a GPU: one launch for decodes and one for prefill chunks, since they want different tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.attention_decode_triton import decode_attention
from kernels.attention_prefill_triton import prefill_attention


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As `kernels.attention.paged_attention`, for CUDA tensors (CPU tensors under Triton's interpreter).

    Raises:
        ValueError: a tensor whose layout the kernels cannot read, or a scale that is not positive.
    """
    _check_layout(query, key_cache, value_cache, batch, scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    prefill_attention(output, query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window)
    if batch.num_decodes > 0:
        decode_attention(output, query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window)
    return output


def _check_layout(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float) -> None:
    if query.stride()[1:] != (query.shape[2], 1):
        raise ValueError(f"query has strides {query.stride()}: heads and head_dim must be contiguous")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache has strides {key_cache.stride()}, value_cache {value_cache.stride()}: "
            "they must be equal, and head_dim contiguous"
        )
    if batch.block_tables.stride(1) != 1:
        raise ValueError(f"block_tables has strides {batch.block_tables.stride()}: its rows must be contiguous")
    if scale <= 0:
        raise ValueError(f"softmax scale {scale}: must be positive")
