"""Runs a batch through the model on its device and draws the sampled tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.executor import Drawn
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.sampler import sample
from kernels.attention import AttentionBatch

SAMPLED_ROWS_AT_ONCE = 256
"""Rows whose logits exist at the same time: bounds the sampler's memory at a large vocabulary."""


class ModelRunner:
    """Executes batches with one decoder and one K/V cache.

    `vocab_limit` is the number of ids the tokenizer knows: a head is often padded beyond it, and those
    ids must never be drawn.
    """

    def __init__(self, model: Decoder, cache: KVCache, *, vocab_limit: int | None = None) -> None:
        self._model = model
        self._cache = cache
        self._vocab_limit = vocab_limit
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Drawn:
        """Compute the batch's tokens and draw the successors of its sampled ones."""
        hidden = self._model(
            self._upload(batch.token_ids).long(),
            self._upload(batch.positions),
            self._cache,
            self._attention_batch(batch),
            self._upload(batch.slot_mapping),
        )
        if not len(batch.sampled_tokens):
            return Drawn(np.empty(0, np.int32), np.empty(0, np.bool_))
        hidden = hidden[self._upload(batch.sampled_tokens)]
        drawn = [
            sample(self._logits(hidden[rows]), batch.sampling.take(rows))
            for rows in _slices(len(hidden), SAMPLED_ROWS_AT_ONCE)
        ]
        token_ids, failed = (torch.cat(parts).cpu().numpy() for parts in zip(*drawn, strict=True))
        return Drawn(token_ids.astype(np.int32), failed)

    def memory(self) -> tuple[int, int]:
        """Bytes the CUDA allocator has given out and reserved; zeros on a CPU."""
        if self._device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_limit]

    def _attention_batch(self, batch: Batch) -> AttentionBatch:
        return AttentionBatch(
            block_tables=self._upload(batch.block_tables),
            query_start=self._upload(batch.query_start),
            context_lens=self._upload(batch.context_lens),
            num_decodes=batch.num_decodes,
            max_query_len=int(np.diff(batch.query_start).max()),
            max_context_len=int(batch.context_lens.max()),
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
