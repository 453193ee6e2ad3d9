"""Plan a window of short prompts given as token ids, start it, and print one JSON line of seconds and bytes.

taskset -c 0 python -m benchmarks.order_million
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from statistics import mean, median

import numpy as np

from benchmarks.null_executor import NullExecutor
from benchmarks.options import BLOCK_SIZE
from benchmarks.provenance import provenance
from engine.engine import Engine
from engine.request import Request, Sampling, TokenIds
from engine.scheduler import Limits
from runner.plan import Plan, plan_prompts

PREFIX_TOKENS, FEWEST_OWN_TOKENS, MOST_OWN_TOKENS = 64, 4, 60
ROWS_OF_A_PREFIX = 100
OUTPUT_TOKENS = range(16, 48)
LIMITS = Limits(max_seqs=1024, max_batch_tokens=8192, max_model_len=1024)
WARM_UP_STEPS, MEASURED_STEPS = 100, 200


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=65_536, help="K/V blocks of the pool")
    parser.add_argument("--order", choices=("prefix", "input", "longest"), default="prefix")
    options = parser.parse_args(arguments)
    prompts = short_prompts(options.rows)
    tokens = sum(map(len, prompts))
    before = _peak_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    plan = plan_prompts(prompts, options.order, BLOCK_SIZE)
    planned = time.perf_counter()
    engine = _engine_with(prompts, plan, options.blocks)
    added = time.perf_counter()
    engine.step()
    stepped, cpu_stepped = time.perf_counter(), time.process_time()
    started = _peak_bytes()
    line = {
        "rows": options.rows,
        "prompt_tokens": tokens,
        "order": options.order,
        "plan_seconds": round(planned - began, 2),
        "add_seconds": round(added - planned, 2),
        "first_step_seconds": round(stepped - added, 3),
        "seconds_before_first_step_ends": round(stepped - began, 2),
        "cpu_seconds_before_first_step_ends": round(cpu_stepped - cpu_began, 2),
        "peak_bytes_of_prompts": before,
        "peak_bytes": started,
        "bytes_per_row_beside_prompts": round((started - before) / options.rows),
        "highest_hit_rate": round(plan.highest_hit_tokens / tokens, 4),
        "pool_blocks": options.blocks,
        **_step_figures(engine),
        **provenance("numpy"),
    }
    print(json.dumps(line))


def short_prompts(rows: int) -> list[TokenIds]:
    """Prompts of 68 to 124 tokens in random order, each behind one of `rows` / 100 prefixes of 64 tokens."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(1, 20_000, (-(-rows // ROWS_OF_A_PREFIX), PREFIX_TOKENS), np.int32)
    lengths = rng.integers(FEWEST_OWN_TOKENS, MOST_OWN_TOKENS + 1, rows)
    behind = rng.integers(len(prefixes), size=rows)
    return [
        np.concatenate((prefixes[prefix], rng.integers(1, 20_000, length, np.int32)))
        for prefix, length in zip(behind.tolist(), lengths.tolist(), strict=True)
    ]


def _engine_with(prompts: list[TokenIds], plan: Plan, blocks: int) -> Engine:
    engine = Engine(NullExecutor(), LIMITS, num_blocks=blocks, block_size=BLOCK_SIZE)
    samplings = [Sampling(max_tokens=tokens) for tokens in OUTPUT_TOKENS]
    for row, reuse in zip(plan.order.tolist(), plan.reuse, strict=True):
        engine.add(Request(row, prompts[row], samplings[row % len(samplings)], reuse=reuse))
    return engine


def _step_figures(engine: Engine) -> dict[str, float]:
    """Of the next steps, in which sequences end and start all the time."""
    cpu_us: list[int] = []
    running: list[int] = []
    cached: list[int] = []
    for _ in range(WARM_UP_STEPS):
        engine.step()
    while len(cpu_us) < MEASURED_STEPS and engine.num_waiting:
        began = time.process_time_ns()
        result = engine.step()
        if result.stats is not None:
            cpu_us.append((time.process_time_ns() - began) // 1000)
            running.append(result.stats.running)
            cached.append(result.stats.blocks_cached)
    return {
        "waiting": engine.num_waiting,
        "measured_steps": len(cpu_us),
        "cpu_us_per_step": round(mean(cpu_us)) if cpu_us else 0,
        "median_cpu_us_per_step": median(cpu_us) if cpu_us else 0,
        "running": median(running) if running else 0,
        "blocks_cached": median(cached) if cached else 0,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
