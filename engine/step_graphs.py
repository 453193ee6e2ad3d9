"""Steps captured as CUDA graphs: one launch for what would take hundreds."""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.batch import Batch
from engine.scheduler import Limits
from engine.step_inputs import StepInputs, StepShape
from engine.upload import STAGES, Array, lay_out
from kernels.page_locked import copy_page_locked

DECODE_SIZES = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
MIXED_SIZES = (16, 64, *range(128, 2049, 128))
LARGE_SIZES = tuple(range(2560, 8193, 512))
MOST_TOKENS = LARGE_SIZES[-1]
"""Tokens of the captured steps: of decodes alone, with prompt chunks among them, and more of the latter.

Up to 128 rows the products of a layer take the same time but for a few percent (30 us at 16 and 64, 32 at 128 for
qwen3-0.6b; 128 at 16 and 136 at 64 for llama-3.1-8b), and a single row takes longer than 16 (34 against 29): a finer
ladder gains nothing. cuBLAS takes longer for 224 and 448 rows than for 256 and 512 (185 and 182, 405 and 296 us a layer
of llama-3.1-8b). Padding to a large size costs up to a fifth of a step, which pays for small models only.
"""
_LAUNCHES_HIDDEN = 1.5
"""Large steps are not captured if one computes longer, by this factor, than launching its kernels one by one takes."""
_TRIALS = 3
_DECODE_COPIES = STAGES
"""A graph is made ready for its launch only once its launch before is over: decodes take turns with two, each of which
reads its own page-locked buffer."""
_MIXED_CHANGES = 4
"""Block changes for each token of a mixed step. A prompt whose beginning was found changes many for few tokens; a step
with more runs kernel by kernel."""


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """A captured step: its number of tokens, and whether there are prompt chunks among them.

    `grouped` ones read prefixes that their decodes share once.
    """

    tokens: int
    mixed: bool
    grouped: bool = False


Compute = Callable[[StepInputs, GraphKey, int], None]
"""Computes a step of a key in the turn of one of the page-locked buffers, here and where its results go."""


class StepGraphs:
    """One graph for each captured number of tokens; a step runs in the next larger one, padded.

    All graphs read their inputs from one buffer and share the memory of their activations, since they run
    one after the other. There is none for more than `most_tokens`, and none that groups prefixes unless told
    that steps may be `grouped`.
    """

    def __init__(
        self,
        limits: Limits,
        most_tokens: int,
        tables: tuple[int, int],
        device: torch.device,
        *,
        grouped: bool = False,
    ) -> None:
        self._grouped = (False, True) if grouped else (False,)
        self._decode_sizes = ladder(DECODE_SIZES, min(limits.max_seqs, DECODE_SIZES[-1]))
        self._mixed_sizes = ladder(MIXED_SIZES + LARGE_SIZES, min(limits.max_batch_tokens, most_tokens))
        self._max_seqs = limits.max_seqs
        self._tables = tables
        self._stages = _Stages(lay_out(self._shape(replace(self.keys[0], grouped=grouped)).empty())[1], device)
        self._places: dict[GraphKey, _Places] = {}
        self._graphs: dict[GraphKey, list[torch.cuda.CUDAGraph]] = {}  # a decode's copies by turn
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def keys(self) -> list[GraphKey]:
        """All graphs, the largest of every kind first: the others fit into their memory."""
        kinds = [
            [GraphKey(size, mixed, grouped) for size in reversed(sizes)]
            for grouped in self._grouped
            for mixed, sizes in ((True, self._mixed_sizes), (False, self._decode_sizes))
        ]
        return [*(kind[0] for kind in kinds), *(key for kind in kinds for key in kind[1:])]

    @property
    def num_kinds(self) -> int:
        """Kinds of graphs: so many of `keys` are the largest ones."""
        return 2 * len(self._grouped)

    @property
    def count(self) -> int:
        """How many graphs there are once all are captured."""
        return len(self._grouped) * (len(self._mixed_sizes) + _DECODE_COPIES * len(self._decode_sizes))

    def largest_worthwhile(self, compute: Compute) -> int:
        """The most tokens of a step that should be captured.

        Where even the smallest large step takes so long that its launches do not matter, large steps are left out. It
        is tried without a single token: attention and experts would only add to its time.
        """
        large = [size for size in self._mixed_sizes if size > MIXED_SIZES[-1]]
        if not large:
            return self._mixed_sizes[-1]
        key = GraphKey(large[0], mixed=True)
        inputs = self._empty_places(key).inputs
        compute(inputs, key, 0)  # loads its kernels
        launching, computing = [], []
        for _ in range(_TRIALS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            compute(inputs, key, 0)
            launching.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
            computing.append(time.perf_counter() - begin)
        return MIXED_SIZES[-1] if min(computing) > _LAUNCHES_HIDDEN * min(launching) else large[-1]

    def capture(self, key: GraphKey, compute: Compute) -> None:
        """Capture `compute`, which must leave its results in memory of its own.

        The step is computed once before, without a single token, so that its kernels are loaded.
        """
        places = self._places[key] = self._empty_places(key)
        with torch.cuda.stream(self._stream):
            compute(places.inputs, key, 0)
            torch.cuda.synchronize()
            copies = 1 if key.mixed else _DECODE_COPIES
            self._graphs[key] = [self._captured(places, key, compute, turn) for turn in range(copies)]

    def _empty_places(self, key: GraphKey) -> _Places:
        """The places of a step without a single token, which is on the device."""
        places = _Places(self._shape(key), self._stages)
        self._stages.fill(places, None, 0)
        self._stages.upload(places, 0)
        torch.cuda.synchronize()
        return places

    def _captured(self, places: _Places, key: GraphKey, compute: Compute, turn: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate page-locked memory meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            if not key.mixed:
                self._stages.upload(places, turn)
            compute(places.inputs, key, turn)
        finally:
            graph.capture_end()
        return graph

    def key_for(self, batch: Batch, *, mixed: bool) -> GraphKey | None:
        """The smallest captured step that holds a batch, None if there is none.

        A mixed one, whose draws are not captured, leaves the suppressed pairs aside.
        """
        sizes = self._mixed_sizes if mixed else self._decode_sizes
        place = bisect_left(sizes, len(batch.token_ids))
        key = GraphKey(sizes[place], mixed, batch.prefixes is not None) if place < len(sizes) else None
        if key is None or key not in self._graphs:
            return None
        shape, pairs = self._places[key].shape, 0 if mixed else len(batch.sampling.suppressed)
        holds = (
            batch.block_changes.shape[1] <= shape.changes
            and pairs <= shape.pairs
            and max(len(batch.slots), len(batch.sampled_slots)) <= shape.sequences
        )
        return key if holds else None

    def run(self, key: GraphKey, batch: Batch, turn: int) -> StepInputs:
        """Start a captured step; its inputs on the device, padding included, until the next one is started.

        The step before the last one, which had the same `turn`, must be over.
        """
        places = self._places[key]
        self._stages.fill(places, batch, turn)
        if key.mixed:
            self._stages.upload(places, turn)
        self._graphs[key][0 if key.mixed else turn].replay()
        return places.inputs

    def _shape(self, key: GraphKey) -> StepShape:
        """Room for a step of `key`; each of its decodes changes one block at most."""
        return StepShape(
            tokens=key.tokens,
            sequences=min(key.tokens, self._max_seqs),
            changes=_MIXED_CHANGES * key.tokens if key.mixed else key.tokens,
            pairs=0 if key.mixed else key.tokens,
            tables=self._tables,
            grouped=key.grouped,
        )


class _Stages:
    """The buffer on the device that graphs read, and the page-locked ones that fill it in turn."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.host = [torch.empty(length, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self.device = torch.zeros(length, dtype=torch.uint8, device=device)

    def fill(self, places: _Places, batch: Batch | None, turn: int) -> None:
        places.shape.fill(places.arrays[turn], batch)

    def upload(self, places: _Places, turn: int) -> None:
        copy_page_locked(self.device[: places.length], self.host[turn][: places.length])


class _Places:
    """Where the arrays of one shape lie in the stages."""

    def __init__(self, shape: StepShape, stages: _Stages) -> None:
        self.shape = shape
        layout, self.length = lay_out(shape.empty())
        self.arrays: list[list[Array]] = [[field.on_host(stage.numpy()) for field in layout] for stage in stages.host]
        self.inputs = StepInputs(*(field.on_device(stages.device) for field in layout))


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures of a process, as cuBLAS keeps a workspace for each it has seen."""
    return torch.cuda.Stream(device)


def ladder(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes below `largest`, and that."""
    return (*(size for size in sizes if size < largest), largest)
