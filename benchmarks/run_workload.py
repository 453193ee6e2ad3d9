"""Run a named workload on a model shape with random weights and print one JSON line.

python -m benchmarks.run_workload nano --model benchmarks/models/qwen3-0.6b
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS, Workload
from engine.engine import Engine
from engine.models.config import read_model_config
from engine.request import Request, Sampling
from engine.startup import EngineSettings, Started, resolve, start
from engine.stats import StepStats
from runner.plan import highest_hit_tokens, order_rows
from runner.units import parse_size

WARM_UP_REQUESTS = 16


def main() -> None:
    options = _options()
    config = read_model_config(options.model)
    settings = EngineSettings(
        dummy_weights=True,
        max_model_len=options.max_model_len,
        kv_memory=parse_size(options.kv_memory) if options.kv_memory else None,
    )
    begin = time.perf_counter()
    started = start(
        options.model,
        config,
        settings,
        resolve(settings, config),
        Sampling(temperature=options.temperature),
        end_token_ids=config.end_token_ids,
    )
    ready = time.perf_counter() - begin
    work = WORKLOADS[options.workload]()
    _complete(started.engine, [(prompt[:-65:-1], 8) for prompt, _ in work[:WARM_UP_REQUESTS]], options.temperature)
    seconds, steps = _complete(started.engine, work, options.temperature)
    report = _report(work, seconds, steps, started, settings.block_size)
    print(
        json.dumps(
            {
                "workload": options.workload,
                "model": options.model.name,
                "temperature": options.temperature,
                "start_seconds": round(ready, 2),
                **report,
                "device": started.device_name,
                **provenance("torch", "triton", "transformers", commit=options.commit),
            }
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-memory", help="size of the K/V pool, such as 4GiB; all there is if unset")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    return parser.parse_args()


def _complete(engine: Engine, work: Workload, temperature: float) -> tuple[float, list[StepStats]]:
    """Run all requests in prefix order; seconds from the first to the last, and the steps."""
    prompts = [np.array(prompt, np.int32) for prompt, _ in work]
    steps: list[StepStats] = []
    begin = time.perf_counter()
    for row in order_rows(prompts, "prefix").tolist():
        sampling = Sampling(temperature=temperature, max_tokens=work[row][1], ignore_eos=True)
        engine.add(Request(row, prompts[row], sampling))
    while engine.has_work:
        stats = engine.step().stats
        if stats is not None:
            steps.append(stats)
    return time.perf_counter() - begin, steps


def _report(
    work: Workload, seconds: float, steps: list[StepStats], started: Started, block_size: int
) -> dict[str, object]:
    prompt_tokens = sum(len(prompt) for prompt, _ in work)
    output_tokens = sum(new for _, new in work)
    prompts = [np.array(prompt, np.int32) for prompt, _ in work]
    ordered = [prompts[row] for row in order_rows(prompts, "prefix")]
    prefill = sum(step.prefill_tokens for step in steps)
    busy = sum(step.duration_us for step in steps)
    return {
        "pool_blocks": started.memory_plan.num_blocks,
        "seconds": round(seconds, 2),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tok_s": round(output_tokens / seconds),
        "hit_rate": round(sum(step.cached_tokens for step in steps) / prompt_tokens, 4),
        "highest_hit_rate": round(highest_hit_tokens(ordered, block_size) / prompt_tokens, 4),
        "prefill_tokens": prefill,
        "recompute_share": round(sum(step.recomputed_tokens for step in steps) / prefill, 4),
        "live_share": round(sum(step.live_fraction * step.duration_us for step in steps) / busy, 4),
        "preemptions": sum(step.preemptions for step in steps),
        "steps": len(steps),
        "ms_per_step": round(busy / len(steps) / 1000, 2),
        "peak_bytes": started.peak_bytes(),
        "planned_bytes": started.memory_plan.weights + started.memory_plan.pool + started.memory_plan.activations,
    }


if __name__ == "__main__":
    main()
