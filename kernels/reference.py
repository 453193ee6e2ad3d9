"""Paged attention in its plain, slow and obviously right float32 form, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch


def reference_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As `kernels.attention.paged_attention`, but computed and returned in float32. Padding tokens get zeros."""
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    group = query.shape[1] // key_cache.shape[2]
    starts = batch.query_start.tolist()
    rows = batch.table_rows.tolist()
    for sequence, context_len in enumerate(batch.context_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        keys = _sequence_rows(key_cache, batch.block_tables[rows[sequence]], context_len)
        values = _sequence_rows(value_cache, batch.block_tables[rows[sequence]], context_len)
        query_position = torch.arange(context_len - (end - begin), context_len, device=query.device)[:, None]
        key_position = torch.arange(context_len, device=query.device)
        visible = key_position <= query_position
        if sliding_window is not None:
            visible &= key_position > query_position - sliding_window
        for head in range(query.shape[1]):
            scores = query[begin:end, head].float() @ keys[:, head // group].T * scale
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            output[begin:end, head] = weights @ values[:, head // group]
    return output


def _sequence_rows(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """Float32 [context_len, kv_heads, head_dim]: what one sequence stored, in order of position."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-context_len // block_size)].tolist()
    return torch.cat([cache[block] for block in blocks])[:context_len].float()
