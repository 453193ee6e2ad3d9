"""Time paged attention on a table of problems and print one JSON line for each.

python -m benchmarks.attention_kernels [--only "decode 256"]

A time is that of one layer: what a step derives once for all layers is made before.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_problems import SCALE, Inputs, Problem, make_inputs, problems, relative_error
from benchmarks.graph_timer import replay_ms
from benchmarks.provenance import provenance
from kernels.attention import paged_attention

COLD_BYTES = 200_000_000
"""A timed round reads so much at least: several times the L2 cache of an H200, so that it reads device memory."""
MOST_COPIES = 64


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **provenance("torch", "triton", commit=options.commit),
    }
    chosen = [problem for problem in problems() if options.only in problem.name]
    if not chosen:
        parser.error(f"no problem's name contains {options.only!r}")
    for problem in chosen:
        print(json.dumps({"problem": problem.name, **measure(problem, device), **source}), flush=True)


def measure(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Relative error and, on a GPU, milliseconds of a launch with the bandwidth and rate that they mean."""
    copies = 1 if device.type == "cpu" else min(MOST_COPIES, -(-COLD_BYTES // problem.bytes_moved))
    inputs = [make_inputs(problem, device, seed) for seed in range(copies)]
    errors = [relative_error(problem, each, _attend_poisoned(each)) for each in (inputs[0], inputs[-1])]
    if device.type == "cpu":
        return {"ms": None, "plain_ms": None, "gb_s": None, "tflops": None, "rel_error": max(errors)}
    ms = replay_ms([partial(_attend, each) for each in inputs])  # with the plans that are in the batches now
    plain_ms = None
    if problem.shares_decodes:
        plain = [replace(each, batch=replace(each.batch, prefixes=None)) for each in inputs]
        plain_ms = round(replay_ms([partial(_attend, each) for each in plain]), 5)
    return {
        "ms": round(ms, 5),
        "plain_ms": plain_ms,
        "gb_s": round(problem.bytes_moved / ms / 1e6),
        "tflops": round(problem.flops / ms / 1e9, 1),
        "rel_error": max(errors),
    }


def _attend(inputs: Inputs) -> Tensor:
    return paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, scale=SCALE)


def _attend_poisoned(inputs: Inputs) -> Tensor:
    """As `_attend`, whose output the allocator is likely to place where NaN stood: what is not written shows."""
    poison = torch.full_like(inputs.query, torch.nan)
    del poison
    return _attend(inputs)


if __name__ == "__main__":
    main()
