"""Which kernels a GPU ran in a stretch of time, and how much of that time it was busy."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Times are microseconds; `wall` runs from the first kernel's start to the last one's end."""

    wall: float
    busy: float
    """When at least one kernel ran."""
    by_name: Counter[str]
    """Time of all kernels of a name; they add up to more than `busy` where kernels overlap."""

    @property
    def busy_share(self) -> float:
        return self.busy / self.wall

    def table(self, steps: int, rows: int = 10) -> str:
        """The kernels that took most time, one a line: microseconds a step and name."""
        return "\n".join(f"{time / steps:10.1f} us/step  {name:.100}" for name, time in self.by_name.most_common(rows))


def profile_kernels(run: Callable[[], None]) -> KernelProfile:
    """Call `run` and profile the CUDA kernels that it launches, to their end. Raises ValueError if there are none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarise(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def summarise(events: Iterable[dict[str, Any]]) -> KernelProfile:
    """The profile of the kernels among the events of a Chrome trace. Raises ValueError if there are none."""
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") == "kernel")
    if not kernels:
        raise ValueError("no kernel ran while profiling")
    by_name: Counter[str] = Counter()
    busy, end = 0.0, kernels[0][0]
    for start, duration, name in kernels:
        by_name[name] += duration
        busy += max(start + duration - max(start, end), 0.0)
        end = max(end, start + duration)
    return KernelProfile(end - kernels[0][0], busy, by_name)


def fullest_steps(running: list[int], length: int, share: float = 0.9) -> range:
    """The first `length` consecutive steps with at least `share` of the largest batch; fewer if there are no more.

    `running` has the sequences of each step, of which there is at least one.
    """
    enough = share * max(running)
    longest, start = range(0), 0
    for step, sequences in enumerate(running):
        if sequences < enough:
            start = step + 1
        elif step + 1 - start > len(longest):
            longest = range(start, step + 1)
            if len(longest) == length:
                break
    return longest
