"""Times of short kernels, without the time that launching them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

FEWEST_CALLS = 5
REPLAYS = 20


def replay_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Median milliseconds of a call, from replays of one CUDA graph that holds them all.

    Calls over separate buffers, too large together for the L2 cache, read device memory. Each call is made
    twice before, which compiles its kernels and makes what it caches.
    """
    for call in [*calls, *calls]:
        call()
    torch.cuda.synchronize()
    captured = [calls[index % len(calls)] for index in range(max(FEWEST_CALLS, len(calls)))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in captured:
            call()
    graph.replay()
    return median(_elapsed_ms(graph) for _ in range(REPLAYS)) / len(captured)


def _elapsed_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
