"""Runs batches through the model on its device and draws the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from kernels.sampling import SamplingSettings, sample_tokens
from torch import Tensor

from engine.batch import Batch, SamplingBatch
from engine.executor import Drawn
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.sampler import position_keys
from engine.scheduler import Limits
from engine.step_graphs import StepGraphs
from engine.step_inputs import StepInputs, input_arrays
from engine.upload import Upload
from kernels.attention import AttentionBatch

SAMPLED_ROWS_AT_ONCE = 512
"""Rows whose logits exist at the same time: bounds the sampler's memory at a large vocabulary."""


class ModelRunner:
    """Executes batches with one decoder and one K/V cache, on the device's current stream.

    What changes little stays on the device: the block tables, which a batch changes, and the last token of
    every slot, which the next step reads without the host. `vocab_limit` is the number of ids the tokenizer
    knows: a head is often padded beyond it, and those ids must never be drawn. With `graphs`, small steps
    run from CUDA graphs once `capture` was called.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, limits: Limits, *, vocab_limit: int | None = None, graphs: bool = False
    ) -> None:
        self._model = model
        self._cache = cache
        self._vocab_limit = vocab_limit
        self._max_context_len = limits.max_model_len
        self._device = next(model.parameters()).device
        width = -(-limits.max_model_len // cache.block_size)
        self._block_tables = torch.zeros(limits.max_seqs, width, dtype=torch.int32, device=self._device)
        self._last_tokens = torch.zeros(limits.max_seqs, dtype=torch.int32, device=self._device)
        self._uploads = (Upload(self._device), Upload(self._device))
        self._results = _Results(limits.max_seqs, self._device)
        self.graphs: StepGraphs | None = None
        if graphs:
            self.graphs = StepGraphs(limits.max_seqs, limits.max_batch_tokens, self._device)
            size = (self.graphs.largest, model.config.hidden_size)
            self._hidden = torch.zeros(size, dtype=model.embed_tokens.dtype, device=self._device)

    @torch.inference_mode()
    def capture(self, count: int | None = None) -> None:
        """Capture the graphs, or the `count` largest of them."""
        if self.graphs is not None:
            for key in self.graphs.keys[:count]:
                self.graphs.capture(key, self._compute_graph)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedBatch:
        """Start computing the batch's tokens and drawing the successors of its sampled ones."""
        sampling, rows = batch.sampling, len(batch.sampled_tokens)
        changes, tokens, slots, *settings = self._uploads[0].send(
            [
                batch.block_changes,
                batch.sampled_tokens,
                batch.sampled_slots,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.min_p,
                position_keys(sampling.row_key, sampling.position),
                sampling.suppressed,
            ]
        )
        if batch.block_changes.size:
            self._block_tables[changes[0].long(), changes[1].long()] = changes[2]
        hidden = self._forward(batch)
        if rows < len(batch.token_ids):
            hidden = hidden[tokens]
        drawn = torch.empty(rows, dtype=torch.int32, device=self._device)
        for part, chosen in _slices(sampling, settings):
            logits = self._model.logits(hidden[part])[:, : self._vocab_limit]
            sample_tokens(logits, chosen, out=drawn[part])
        self._last_tokens.index_copy_(0, slots, drawn.clamp(min=0))
        return self._results.fetch(drawn)

    def memory(self) -> tuple[int, int]:
        """Bytes the CUDA allocator has given out and reserved; zeros on a CPU."""
        if self._device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states of all tokens of a batch, [tokens, hidden]."""
        if self.graphs is not None and self.graphs.run(batch):
            return self._hidden[: len(batch.token_ids)]
        inputs = StepInputs(*self._uploads[1].send(input_arrays(batch)))
        return self._compute(inputs, num_decodes=batch.num_decodes, max_query_len=int(np.diff(batch.query_start).max()))

    def _compute_graph(self, inputs: StepInputs, max_query_len: int) -> None:
        tokens = len(inputs.token_ids)
        self._compute(inputs, num_decodes=tokens, max_query_len=max_query_len, out=self._hidden[:tokens])

    def _compute(
        self, inputs: StepInputs, *, num_decodes: int, max_query_len: int, out: Tensor | None = None
    ) -> Tensor:
        layout = AttentionBatch(
            block_tables=self._block_tables,
            table_rows=inputs.table_rows,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_context_len=self._max_context_len,
        )
        unread = self._last_tokens[(-1 - inputs.token_ids).clamp_(min=0)]
        token_ids = torch.where(inputs.token_ids < 0, unread, inputs.token_ids)
        return self._model(token_ids, inputs.positions, self._cache, layout, inputs.slot_mapping, out=out)


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """Draws on their way to the host: int32 [rows], negative where the logits were not finite."""

    drawn: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> Drawn:
        """The draws, as soon as they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        drawn = self.drawn.numpy()
        return Drawn(np.maximum(drawn, 0), drawn < 0)


class _Results:
    """Page-locked memory for the draws of two launched steps."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._host = torch.empty(2, max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._steps = 0

    def fetch(self, drawn: Tensor) -> LaunchedBatch:
        if not drawn.is_cuda:
            return LaunchedBatch(drawn, None)
        place = self._host[self._steps % 2, : len(drawn)]
        self._steps += 1
        place.copy_(drawn, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return LaunchedBatch(place, copied)


def _slices(sampling: SamplingBatch, settings: list[Tensor]) -> Iterator[tuple[slice, SamplingSettings]]:
    """The sampled rows in parts of bounded size, with the settings of each."""
    temperature, top_p, top_k, min_p, keys, suppressed = settings
    rows = len(temperature)
    for start in range(0, rows, SAMPLED_ROWS_AT_ONCE):
        part = slice(start, min(start + SAMPLED_ROWS_AT_ONCE, rows))
        pairs = suppressed[slice(*np.searchsorted(sampling.suppressed[:, 0], (part.start, part.stop)).tolist())]
        if start and len(pairs):
            pairs = torch.stack((pairs[:, 0] - start, pairs[:, 1]), dim=1)
        yield (
            part,
            SamplingSettings(
                temperature=temperature[part],
                top_p=top_p[part],
                top_k=top_k[part],
                min_p=min_p[part],
                keys=keys[part],
                suppressed=pairs,
                filtered=sampling.filtered,
            ),
        )
