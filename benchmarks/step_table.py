"""Where the time of a run goes: its steps by what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.stats import StepStats

SMALLEST_BATCH = 16
"""Batches up to this size share a line; from there on a line covers sizes up to twice those of the one before."""


def step_table(steps: Sequence[StepStats], host_us: Sequence[int]) -> str:
    """Steps with prompt tokens in one line, decodes by batch size in the others: count, seconds, time and host time."""
    running = np.array([step.running for step in steps])
    prefill = np.array([step.prefill_tokens for step in steps]) > 0
    milliseconds = np.array([step.duration_us for step in steps]) / 1000
    host = np.array(host_us)
    lines = ["steps of             steps  seconds  ms a step  host us"]
    chosen = {"prompt chunks, too": prefill}
    low, high = 1, SMALLEST_BATCH
    while low <= running.max(initial=0):
        chosen[f"{low} to {high} decodes"] = ~prefill & (running >= low) & (running <= high)
        low, high = high + 1, 2 * high
    for name, some in chosen.items():
        if some.any():
            mean_ms, mean_host = milliseconds[some].mean(), host[some].mean()
            lines.append(
                f"{name:20} {some.sum():5} {milliseconds[some].sum() / 1000:8.2f} {mean_ms:10.2f} {mean_host:8.0f}"
            )
    return "\n".join(lines)
