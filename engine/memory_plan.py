"""How many K/V blocks the device holds: measured on a GPU, given on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.batch import Batch, SamplingBatch
from engine.kv_cache import KVCache, KVCacheShape
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.request import Sampling
from engine.scheduler import Limits
from engine.step_graphs import MOST_TOKENS

GPU_RESERVE_BYTES = 1 << 30
"""Left free on a GPU: the allocator's rounding, the driver's own growth, kernels loaded later."""
CPU_POOL_BYTES = 1 << 30
MOST_STEP_SHARE = 0.25
"""Of the memory that steps and the pool have together: larger steps are halved, as sequences need the room more."""
FEWEST_BATCH_TOKENS = 1024
"""Steps are not made smaller than this: matrix products of fewer rows leave most of a GPU idle."""


class OutOfMemoryError(RuntimeError):
    """The device cannot hold the model and a useful block pool."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes.

    `activations` is the peak of a full-size step above the weights, through the real sampler, with the
    state that stays on the device; `graphs` is what the captured steps take, activations of their own
    included; `others` is held by other programs and by CUDA itself. On a CPU only `weights` and `pool` are known.
    """

    weights: int
    activations: int
    graphs: int
    pool: int
    reserve: int
    others: int
    num_blocks: int
    graph_tokens: int = 0
    """The most tokens of a captured step; 0: none is."""

    def __str__(self) -> str:
        parts = ("weights", "activations", "graphs", "pool", "reserve", "others")
        sizes = ", ".join(f"{part} {size / 2**30:.2f} GiB" for part in parts if (size := getattr(self, part)))
        return f"{sizes}: {self.num_blocks} blocks"


def plan_steps(
    plan: Callable[[Limits], MemoryPlan], limits: Limits, *, choose_tokens: bool, choose_seqs: bool
) -> tuple[Limits, MemoryPlan]:
    """The `plan` for `limits`, or for smaller ones where they leave too little to the pool.

    `choose_tokens` allows fewer tokens a step, `choose_seqs` fewer sequences: no more run than there are blocks.
    Raises OutOfMemoryError where nothing fits.
    """
    while True:
        smaller = max(limits.max_batch_tokens // 2, limits.max_seqs, FEWEST_BATCH_TOKENS)
        can_shrink = choose_tokens and smaller < limits.max_batch_tokens
        try:
            found = plan(limits)
        except (OutOfMemoryError, torch.OutOfMemoryError) as error:
            if not can_shrink:
                raise OutOfMemoryError(str(error)) from error
        else:
            steps = found.activations + found.graphs
            if not can_shrink or steps <= MOST_STEP_SHARE * (steps + found.pool):
                break
        limits = replace(limits, max_batch_tokens=smaller)
    if choose_seqs:
        limits = replace(limits, max_seqs=min(limits.max_seqs, found.num_blocks))
    return limits, found


def plan_memory(
    model: Decoder,
    shape: KVCacheShape,
    limits: Limits,
    sampling: Sampling,
    *,
    kv_memory: int | None,
    graphs: bool = False,
    grouped: bool = False,
) -> MemoryPlan:
    """Size the block pool for `model`, whose weights are loaded.

    On a GPU the pool gets what is free now less the measured peak of a full-size step, the captured `graphs` (with
    those of `grouped` steps) and a reserve; on a CPU `CPU_POOL_BYTES`. `kv_memory` (bytes) is taken as given instead.
    Raises OutOfMemoryError if not even one block fits or if `kv_memory` is more than there is.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    device = next(model.parameters()).device
    if device.type == "cuda":
        activations = _measure_activations(model, shape, limits, sampling)
        graph_tokens = _measure_steps(model, shape, limits) if graphs else 0
        captured = _measure_graphs(model, shape, limits, sampling, graph_tokens, grouped) if graphs else 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reserve = GPU_RESERVE_BYTES
        others = total - free - torch.cuda.memory_allocated(device)
        room = free - activations - captured - reserve
    else:
        activations = captured = graph_tokens = reserve = others = 0
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weights
    automatic = room if device.type == "cuda" else CPU_POOL_BYTES
    pool = automatic if kv_memory is None else kv_memory
    if pool > room:
        raise OutOfMemoryError(
            f"the K/V pool would take {pool} bytes, and {max(room, 0)} are left beside weights ({weights}), "
            f"activations ({activations}), graphs ({captured}), reserve ({reserve}) and other programs "
            f"({others}): lower it or leave it auto"
        )
    num_blocks = pool // shape.block_bytes
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"{max(pool, 0)} bytes are left for the K/V pool, and one block takes {shape.block_bytes}: "
            "use a smaller model, engine.max_batch_tokens or engine.block_size, or raise engine.kv_memory"
        )
    pool = num_blocks * shape.block_bytes
    return MemoryPlan(weights, activations, captured, pool, reserve, others, num_blocks, graph_tokens)


def _measure_activations(model: Decoder, shape: KVCacheShape, limits: Limits, sampling: Sampling) -> int:
    """Peak bytes above the weights while the largest step runs; it compiles the kernels on the way."""
    device = next(model.parameters()).device
    cache = KVCache(shape, 1, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner = ModelRunner(model, cache, limits)
    runner.launch(_largest_batch(shape.block_size, limits, sampling)).wait()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_steps(model: Decoder, shape: KVCacheShape, limits: Limits) -> int:
    """The most tokens of a step that is worth capturing."""
    cache = KVCache(shape, 1, next(model.parameters()).device)
    return ModelRunner(model, cache, limits, graph_tokens=MOST_TOKENS).largest_graph()


def _measure_graphs(
    model: Decoder, shape: KVCacheShape, limits: Limits, sampling: Sampling, graph_tokens: int, grouped: bool
) -> int:
    """Bytes that all graphs take, from what some do: the largest of every kind make the memory that all share."""
    device = next(model.parameters()).device
    torch.cuda.empty_cache()
    free = [torch.cuda.mem_get_info(device)[0]]
    cache = KVCache(shape, 1, device)
    runner = ModelRunner(model, cache, limits, graph_tokens=graph_tokens, filtered=sampling.filtered, grouped=grouped)
    assert runner.graphs is not None
    kinds = runner.graphs.num_kinds
    for part in (slice(0, kinds), slice(kinds, kinds + 1)):
        runner.capture(part)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    return free[0] - free[1] + (runner.graphs.count - kinds) * max(0, free[1] - free[2])


def _largest_batch(block_size: int, limits: Limits, sampling: Sampling) -> Batch:
    """As many sequences and tokens as `limits` allow, all in one block: what they say does not matter."""
    rows = limits.max_seqs
    each, left = divmod(limits.max_batch_tokens, rows)
    counts = np.minimum(each + (np.arange(rows)[::-1] < left), limits.max_model_len)  # single tokens come first
    query_start = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slot_mapping=positions % block_size,
        query_start=query_start.astype(np.int32),
        context_lens=counts.astype(np.int32),
        slots=np.arange(rows),
        num_decodes=int(np.count_nonzero(counts == 1)),
        block_changes=np.empty((3, 0), np.int32),
        sampled_tokens=query_start[1:] - 1,
        sampled_slots=np.arange(rows),
        sampling=SamplingBatch(
            temperature=np.full(rows, sampling.temperature, np.float32),
            top_p=np.full(rows, sampling.top_p, np.float32),
            top_k=np.full(rows, sampling.top_k, np.int32),
            min_p=np.full(rows, sampling.min_p, np.float32),
            row_key=np.arange(rows, dtype=np.uint64),
            position=counts,
            suppressed=np.empty((0, 2), np.int32),
        ),
    )
