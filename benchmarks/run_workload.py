"""Run a named workload on a model shape with random weights and print one JSON line.

python -m benchmarks.run_workload nano --model benchmarks/models/qwen3-0.6b --profile
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from benchmarks.bound import DEVICE, bound_seconds, read_model_cost
from benchmarks.kernel_profile import KernelProfile, fullest_steps, profile_kernels
from benchmarks.options import BLOCK_SIZE, read_workload, workload_parser
from benchmarks.provenance import provenance
from benchmarks.step_table import step_table
from benchmarks.workloads import LARGEST_ID, ORDERS, Work, planned, totals
from engine.admission import AdmissionRule
from engine.engine import Engine
from engine.kv_cache import KVCacheShape
from engine.memory_plan import OutOfMemoryError
from engine.models.config import ModelConfig, ModelError, read_model_config
from engine.request import Request, Sampling
from engine.startup import EngineSettingError, EngineSettings, Resolved, Started, resolve, start
from engine.stats import StepStats

WARM_UP_REQUESTS, WARM_UP_TOKENS = 16, 8
PROFILED_STEPS = 100
HIDDEN_CAP = 2048
"""New tokens that the engine has to reckon with where it is not told the lengths."""


def main(arguments: list[str] | None = None) -> None:
    parser = _options()
    options = parser.parse_args(arguments)
    work = read_workload(parser, options)
    begin = time.perf_counter()
    try:
        started, resolved = _start(options)
    except (ModelError, EngineSettingError) as error:
        parser.error(_with_options(str(error)))
    except OutOfMemoryError as error:
        parser.error(f"--kv-blocks {options.kv_blocks}: {_with_options(str(error))}")
    start_seconds = time.perf_counter() - begin
    _complete(started.engine, _warm_up(work), options)
    seconds, steps, host_us = _complete(started.engine, work, options)
    print(step_table(steps, host_us), file=sys.stderr)
    memory = _memory(started)
    window = fullest_steps([step.running for step in steps], PROFILED_STEPS)
    profile = None
    if options.profile and started.device.type == "cuda":
        profile = _profile(started.engine, work, options, window)
        print(profile.table(len(window)), file=sys.stderr)
    line = {
        "workload": options.workload,
        "model": options.model.name,
        "scale": options.scale,
        "temperature": options.temperature,
        "order": options.order,
        "admission": options.admission,
        "hidden_lengths": options.hide_lengths,
        "group_prefixes": resolved.group_prefixes,
        "cuda_graphs": resolved.cuda_graphs,
        "async_steps": resolved.async_steps,
        "start_seconds": round(start_seconds, 2),
        **_throughput(work, seconds, started, options.model),
        **_step_figures(work, seconds, steps),
        "host_us_per_step": round(mean(host_us[window.start : window.stop]), 1),
        **_profile_figures(profile, window),
        **memory,
        "device": started.device_name,
        **provenance("torch", "triton", "transformers", commit=options.commit),
    }
    print(json.dumps(line))


def _options() -> argparse.ArgumentParser:
    parser = workload_parser(__doc__)
    parser.add_argument("--order", choices=ORDERS, default="sorted", help="of the requests (%(default)s)")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel, from no captured graph")
    parser.add_argument("--no-async", action="store_true", help="read each step's tokens before the next is launched")
    parser.add_argument("--admission", choices=get_args(AdmissionRule), default="planned", help="(%(default)s)")
    parser.add_argument(
        "--hide-lengths", action="store_true", help=f"allow {HIDDEN_CAP} new tokens, and stop at the workload's length"
    )
    parser.add_argument("--no-grouping", action="store_true", help="read shared prefixes with every sequence")
    parser.add_argument("--profile", action="store_true", help="run again under a profiler; kernels go to stderr")
    return parser


def _with_options(message: str) -> str:
    """A message of the engine, with our options in place of its settings."""
    return message.replace("engine.max_model_len", "--max-len").replace("engine.kv_memory", "--kv-blocks")


def _start(options: argparse.Namespace) -> tuple[Started, Resolved]:
    config = read_model_config(options.model)
    if config.vocab_size <= LARGEST_ID:
        raise ModelError(f"{options.model}: vocab_size {config.vocab_size}; the prompts have ids up to {LARGEST_ID}")
    settings = EngineSettings(
        dummy_weights=True,
        block_size=BLOCK_SIZE,
        max_model_len=options.max_len,
        cuda_graphs=False if options.no_graphs else None,
        async_steps=False if options.no_async else None,
        admission=options.admission,
        group_prefixes=False if options.no_grouping else None,
    )
    resolved = resolve(settings, config)
    if options.kv_blocks is not None:
        settings = replace(settings, kv_memory=options.kv_blocks * _block_bytes(config, resolved))
    sampling = Sampling(temperature=options.temperature)
    return start(options.model, config, settings, resolved, sampling, end_token_ids=()), resolved


def _block_bytes(config: ModelConfig, resolved: Resolved) -> int:
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, resolved.dtype)
    return shape.block_bytes


def _warm_up(work: list[Work]) -> list[Work]:
    """A few short prompts that share nothing with `work`: its last tokens backwards."""
    return [Work(item.prompt[:-65:-1], WARM_UP_TOKENS) for item in work[:WARM_UP_REQUESTS]]


def _add(engine: Engine, work: list[Work], options: argparse.Namespace) -> None:
    for row, (item, reuse) in enumerate(planned(work, options.order, BLOCK_SIZE)):
        most = max(HIDDEN_CAP, item.new_tokens) if options.hide_lengths else item.new_tokens
        sampling = Sampling(temperature=options.temperature, max_tokens=most, ignore_eos=True)
        hidden = item.new_tokens if options.hide_lengths else None
        engine.add(Request(row, item.prompt, sampling, reuse=reuse, stop_after=hidden))


def _complete(
    engine: Engine, work: list[Work], options: argparse.Namespace
) -> tuple[float, list[StepStats], list[int]]:
    """Run all requests; seconds from ordering the first to completing the last, and of each step the
    statistics and the microseconds that the call which finished it kept the host busy."""
    steps: list[StepStats] = []
    host_us: list[int] = []
    output_tokens = 0
    begin = time.perf_counter()
    _add(engine, work, options)
    while engine.has_work:
        result = engine.step()
        for completion in result.completions:
            if completion.error is not None:
                raise RuntimeError(completion.error)
            output_tokens += len(completion.token_ids)
        if result.stats is not None:
            steps.append(result.stats)
            host_us.append(result.host_us)
    seconds = time.perf_counter() - begin
    expected = sum(item.new_tokens for item in work)
    if output_tokens != expected:
        raise RuntimeError(f"the engine made {output_tokens} tokens, and the workload has {expected}")
    return seconds, steps, host_us


def _profile(engine: Engine, work: list[Work], options: argparse.Namespace, window: range) -> KernelProfile:
    """Run the steps of `window` under the profiler, after those before it; the rest is cancelled.

    Other token ids in the same order give the same schedule, and find nothing in the prefix cache.
    """
    _add(engine, [Work(item.prompt + 1, item.new_tokens) for item in work], options)
    _step(engine, window.start)
    profile = profile_kernels(lambda: _step(engine, len(window)))
    engine.cancel()
    return profile


def _step(engine: Engine, steps: int) -> None:
    """Step until so many steps have finished, or there is no work left."""
    finished = 0
    while finished < steps and engine.has_work:
        finished += engine.step().stats is not None


def _throughput(work: list[Work], seconds: float, started: Started, model: Path) -> dict[str, Any]:
    counts = totals(work, BLOCK_SIZE)
    pool_blocks = started.memory_plan.num_blocks
    bound = None
    if DEVICE in started.device_name:
        bound = round(bound_seconds(work, read_model_cost(model), pool_blocks * BLOCK_SIZE), 2)
    return {
        "pool_blocks": pool_blocks,
        "seconds": round(seconds, 2),
        "bound_seconds": bound,
        "output_tok_s": round(counts["output_tokens"] / seconds),
        **counts,
    }


def _step_figures(work: list[Work], seconds: float, steps: list[StepStats]) -> dict[str, Any]:
    prompt_tokens = sum(len(item.prompt) for item in work)
    prefill = sum(step.prefill_tokens for step in steps)
    recomputed = sum(step.recomputed_tokens for step in steps)
    duration = sum(step.duration_us for step in steps)
    return {
        "hit_rate": round(sum(step.cached_tokens for step in steps) / prompt_tokens, 4),
        "prefill_tokens": prefill,
        "recompute_share": round(recomputed / prefill, 4),
        "live_share": round(sum(step.live_fraction * step.duration_us for step in steps) / duration, 4),
        "preemptions": sum(step.preemptions for step in steps),
        "steps": len(steps),
        "largest_batch": max(step.running for step in steps),
        "ms_per_step": round(1000 * seconds / len(steps), 3),
    }


def _profile_figures(profile: KernelProfile | None, window: range) -> dict[str, Any]:
    if profile is None:
        return {"gpu_busy_share": None, "kernel_ms_per_step": None, "profiled_steps": 0}
    return {
        "gpu_busy_share": round(profile.busy_share, 4),
        "kernel_ms_per_step": round(profile.by_name.total() / len(window) / 1000, 3),
        "profiled_steps": len(window),
    }


def _memory(started: Started) -> dict[str, Any]:
    plan, peak = started.memory_plan, started.peak_bytes()
    planned = plan.weights + plan.activations + plan.graphs + plan.pool
    return {
        "peak_bytes": peak,
        "planned_bytes": planned,
        "plan_error_bytes": planned - peak if started.device.type == "cuda" else None,
    }


if __name__ == "__main__":
    main()
