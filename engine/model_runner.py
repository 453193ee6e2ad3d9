"""Runs batches through the model on its device and draws the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.executor import DeviceOutOfMemoryError, Drawn
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.prefix_groups import PrefixSegments
from engine.scheduler import Limits
from engine.sequence import Slots
from engine.step_graphs import GraphKey, StepGraphs
from engine.step_inputs import StepInputs, exact_shape
from engine.upload import STAGES, Upload
from kernels.attention import AttentionBatch
from kernels.attention_batch import SharedPrefixes
from kernels.attention_grouping import grouping_pays
from kernels.page_locked import copy_page_locked
from kernels.sampling import SamplingSettings, sample_tokens
from kernels.step_start import start_step

_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""What CUDA and its libraries say if an allocation of theirs fails."""
SAMPLED_ROWS_AT_ONCE = 512
"""Rows whose logits exist at the same time: bounds the sampler's memory at a large vocabulary."""


class ModelRunner:
    """Executes batches with one decoder and one K/V cache, on the device's current stream.

    What changes little stays on the device: the block tables, which a batch changes, and the last token of
    every slot, which the next step reads without the host. `vocab_limit` is the number of ids the tokenizer
    knows: a head is often padded beyond it, and those ids must never be drawn. Steps of up to `graph_tokens` run from
    CUDA graphs once `capture` was called; `filtered` says whether their rows may draw from a part of the
    vocabulary only (top-k, top-p, min-p), which takes kernels of its own, and `grouped` whether there are graphs in
    which decodes read the prefixes that they share once.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        limits: Limits,
        *,
        vocab_limit: int | None = None,
        graph_tokens: int = 0,
        filtered: bool = False,
        grouped: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._vocab_limit = vocab_limit
        self._filtered = filtered
        self._max_context_len = limits.max_model_len
        self._device = next(model.parameters()).device
        self._tables_shape = (limits.max_seqs + 1, -(-limits.max_model_len // cache.block_size))
        self._block_tables = torch.zeros(self._tables_shape, dtype=torch.int32, device=self._device)
        self._last_tokens = torch.zeros(limits.max_seqs + 1, dtype=torch.int32, device=self._device)
        # Each sends once a step at most, so that what a step under way reads is not written again.
        self._upload, self._upload_pairs, self._upload_copies = (Upload(self._device) for _ in range(3))
        self._results = _Results(self._last_tokens)
        self._turn = 0
        self.graphs: StepGraphs | None = None
        if graph_tokens:
            self.graphs = StepGraphs(limits, graph_tokens, self._tables_shape, self._device, grouped=grouped)
        size = (self.graphs.keys[0].tokens if self.graphs else 0, model.config.hidden_size)
        self._hidden = torch.zeros(size, dtype=model.embed_tokens.dtype, device=self._device)

    @torch.inference_mode()
    def capture(self, part: slice = slice(None)) -> None:
        """Capture the graphs, or a part of them in the order of `StepGraphs.keys`."""
        if self.graphs is not None:
            for key in self.graphs.keys[part]:
                self.graphs.capture(key, self._compute_captured)

    @torch.inference_mode()
    def largest_graph(self) -> int:
        """The most tokens of a step that should be captured, of those that may be; 0 if none may."""
        return 0 if self.graphs is None else self.graphs.largest_worthwhile(self._compute_captured)

    def launch(self, batch: Batch) -> LaunchedBatch:
        """Start computing the batch's tokens and drawing the successors of its sampled ones.

        Raises DeviceOutOfMemoryError.
        """
        try:
            return self._launch(batch)
        except RuntimeError as error:  # torch.OutOfMemoryError, and what libraries make of it
            if isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
                raise DeviceOutOfMemoryError(str(error)) from None
            raise

    def release(self) -> None:
        """Give back the memory of the cache and the graphs; nothing can be launched after it."""
        del self._cache, self.graphs, self._hidden

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> LaunchedBatch:
        self._turn = (self._turn + 1) % STAGES
        if batch.block_copies.size:
            self._copy_blocks(batch)
        if batch.prefixes is not None and not self._grouping_pays(batch.prefixes):
            batch = replace(batch, prefixes=None)
        if not self._replay_decodes(batch):
            rows = len(batch.sampled_tokens)
            hidden, inputs = self._hidden_states(batch)
            suppressed = inputs.suppressed
            if len(suppressed) < len(batch.sampling.suppressed):
                suppressed = self._upload_pairs.send([batch.sampling.suppressed])[0]
            settings = _settings(inputs, rows, suppressed, filtered=batch.sampling.filtered)
            self._draw(hidden[inputs.sampled_tokens[:rows]], settings, inputs.sampled_slots[:rows])
            self._results.fetch(self._turn)
        return self._results.launched(self._turn, batch.sampled_slots)

    def memory(self) -> tuple[int, int]:
        """Bytes the CUDA allocator has given out and reserved; zeros on a CPU."""
        if self._device.type != "cuda":
            return 0, 0
        # memory_allocated() and memory_reserved() each flatten all statistics first, at 0.3 ms.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]

    def _replay_decodes(self, batch: Batch) -> bool:
        """Start a step of decodes alone, draws included, from its graph; False if there is none for it."""
        every_token_is_sampled = len(batch.sampled_tokens) == len(batch.slots) == len(batch.token_ids)
        if self.graphs is None or not every_token_is_sampled or (batch.sampling.filtered and not self._filtered):
            return False
        key = self.graphs.key_for(batch, mixed=False)
        if key is None:
            return False
        self.graphs.run(key, batch, self._turn)
        return True

    def _copy_blocks(self, batch: Batch) -> None:
        sources, targets = self._upload_copies.send([*batch.block_copies.astype(np.int64)])
        self._cache.copy_blocks(sources, targets)

    def _grouping_pays(self, prefixes: PrefixSegments) -> bool:
        config = self._model.config
        return grouping_pays(
            saved_keys=prefixes.saved_keys,
            members=prefixes.num_members,
            distinct_keys=prefixes.distinct_keys,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=self._cache.shape.dtype.itemsize,
        )

    def _hidden_states(self, batch: Batch) -> tuple[Tensor, StepInputs]:
        """Hidden states of all tokens of a batch, [tokens, hidden], from a graph where there is one."""
        key = None if self.graphs is None else self.graphs.key_for(batch, mixed=True)
        if self.graphs is not None and key is not None:
            return self._hidden, self.graphs.run(key, batch, self._turn)
        shape = exact_shape(batch, self._tables_shape)
        arrays = shape.empty()
        shape.fill(arrays, batch)
        inputs = StepInputs(*self._upload.send(arrays))
        longest = int(np.diff(batch.query_start).max())
        return self._compute(inputs, num_decodes=batch.num_decodes, max_query_len=longest), inputs

    def _compute_captured(self, inputs: StepInputs, key: GraphKey, turn: int) -> None:
        """What a graph holds: a step of decodes with its draws, on their way to the host, a mixed one up to the
        hidden states."""
        rows = len(inputs.table_rows)
        longest = key.tokens if key.mixed else 1
        hidden = self._compute(inputs, num_decodes=rows, max_query_len=longest, out=self._hidden[: key.tokens])
        if not key.mixed:
            settings = _settings(inputs, rows, inputs.suppressed, filtered=self._filtered)
            self._draw(hidden, settings, inputs.sampled_slots)
            self._results.fetch(turn)

    def _compute(
        self, inputs: StepInputs, *, num_decodes: int, max_query_len: int, out: Tensor | None = None
    ) -> Tensor:
        hidden = start_step(
            inputs.token_ids,
            self._last_tokens,
            self._model.embed_tokens,
            self._block_tables,
            inputs.changed_places,
            inputs.changed_blocks,
        )
        layout = AttentionBatch(
            block_tables=self._block_tables,
            table_rows=inputs.table_rows,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_context_len=self._max_context_len,
            prefixes=SharedPrefixes(inputs.segments, inputs.own_start, inputs.own_segments)
            if len(inputs.segments)
            else None,
        )
        return self._model(hidden, inputs.positions, self._cache, layout, inputs.slot_mapping, out=out)

    def _draw(self, hidden: Tensor, settings: SamplingSettings, slots: Tensor) -> None:
        """Draw a token for each of `hidden` [rows, hidden] as the last one of its slot, int64 [rows]."""
        for start in range(0, len(hidden), SAMPLED_ROWS_AT_ONCE):
            part = slice(start, min(start + SAMPLED_ROWS_AT_ONCE, len(hidden)))
            logits = self._model.logits(hidden[part])[:, : self._vocab_limit]
            sample_tokens(logits, _part(settings, part), out=self._last_tokens, places=slots[part])


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """Draws on their way to the host."""

    last_tokens: Tensor
    """int32 [slots]: what each slot drew last, negative where the logits were not finite."""
    slots: Slots
    """Of the rows."""
    copied: torch.cuda.Event | None

    def wait(self) -> Drawn:
        """The draws, as soon as they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        drawn = self.last_tokens.numpy()[self.slots]
        return Drawn(np.maximum(drawn, 0), drawn < 0)


class _Results:
    """Where the draws of launched steps go on the host, in turn: page-locked memory if the device is a GPU."""

    def __init__(self, last_tokens: Tensor) -> None:
        self._last_tokens = last_tokens
        turns = STAGES if last_tokens.is_cuda else 0
        self._host = [torch.empty(len(last_tokens), dtype=torch.int32, pin_memory=True) for _ in range(turns)]

    def fetch(self, turn: int) -> None:
        """On a GPU, copy the last tokens as they are before any later step."""
        if self._host:
            copy_page_locked(self._host[turn], self._last_tokens)

    def launched(self, turn: int, slots: Slots) -> LaunchedBatch:
        """The draws of `slots` that were fetched."""
        if not self._host:
            return LaunchedBatch(self._last_tokens.clone(), slots, None)
        copied = torch.cuda.Event()
        copied.record()
        return LaunchedBatch(self._host[turn], slots, copied)


def _settings(inputs: StepInputs, rows: int, suppressed: Tensor, *, filtered: bool) -> SamplingSettings:
    return SamplingSettings(
        temperature=inputs.temperature[:rows],
        top_p=inputs.top_p[:rows],
        top_k=inputs.top_k[:rows],
        min_p=inputs.min_p[:rows],
        keys=inputs.keys[:rows],
        suppressed=suppressed,
        filtered=filtered,
    )


def _part(settings: SamplingSettings, part: slice) -> SamplingSettings:
    """The settings of a range of rows. Pairs of rows outside it are out of range, which suppresses nothing."""
    pairs = settings.suppressed
    return SamplingSettings(
        temperature=settings.temperature[part],
        top_p=settings.top_p[part],
        top_k=settings.top_k[part],
        min_p=settings.min_p[part],
        keys=settings.keys[part],
        suppressed=torch.stack((pairs[:, 0] - part.start, pairs[:, 1]), dim=1) if part.start and len(pairs) else pairs,
        filtered=settings.filtered,
    )
