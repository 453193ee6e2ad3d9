"""`mode=plan`: reads and tokenises all rows of a job, and prints what it will cost; runs and writes nothing."""

from __future__ import annotations

import numpy as np

from engine.pool_estimate import PoolEstimate, estimate_pool
from runner.column_order import advise_columns
from runner.config import ConfigError, RunConfig
from runner.forecast import Forecast, ForecastSums, Problem
from runner.job_inputs import JobInputs

_GIB = 1 << 30


def show_plan(config: RunConfig) -> int:
    """Print the plan of a whole job, whatever of it is done already; the exit code, 0.

    Raises ConfigError, SourceError and ModelError for what is refused. A pool that this machine does not hold is
    not: the job may be planned elsewhere than it runs.
    """
    inputs = JobInputs(config)
    pool = estimate_pool(inputs.model.config, inputs.settings, inputs.resolved)
    if config.engine.kv_memory_bytes is not None and not pool.num_blocks:
        raise ConfigError("engine.kv_memory", config.engine.kv_memory, f"one block at least, {pool.block} bytes")
    max_model_len = inputs.resolved.limits.max_model_len
    if pool.num_blocks:
        max_model_len = min(max_model_len, pool.num_blocks * config.engine.block_size)
        inputs.limit_length(max_model_len)
    sums = ForecastSums(
        block_size=config.engine.block_size,
        max_model_len=max_model_len,
        max_tokens=config.sampling.max_tokens,
        samples=config.sampling.n,
    )
    for window in inputs.windows(np.empty(0, np.int64), stopped=lambda: False):
        sums.add(window)
    print(render_plan(sums.total(), pool, config, max_seqs=inputs.resolved.limits.max_seqs))
    if config.order.columns is not None:
        print(f"{'columns':<13} {advise_columns(config, inputs)}")
    return 0


def render_plan(forecast: Forecast, pool: PoolEstimate, config: RunConfig, *, max_seqs: int) -> str:
    """The plan as lines of text; `max_seqs` is the engine's."""
    lines = [("rows", f"{forecast.rows:,}, {forecast.rows_failing:,} of them cannot run")]
    lines += [("", _problem(each)) for each in forecast.problems]
    if forecast.rows_running:
        hits = forecast.highest_hit_tokens if config.engine.prefix_cache else 0
        lines += [
            ("prompts", _prompts(forecast)),
            ("prefix hits", _hits(forecast, hits, is_on=config.engine.prefix_cache)),
            ("output", _output(forecast, config)),
        ]
    lines.append(("pool", _pool(pool, config)))
    if forecast.rows_running and pool.num_blocks:
        lines += [
            ("largest row", _largest(forecast, pool, config)),
            ("at once", _at_once(forecast, pool, hits // config.engine.block_size, config.sampling.n, max_seqs)),
        ]
    return "\n".join(f"{name:<13} {text}" for name, text in lines)


def _problem(problem: Problem) -> str:
    named = ", ".join(map(str, problem.first_rows))
    more = ", …" if problem.rows > len(problem.first_rows) else ""
    return f"{problem.rows:,} ({named}{more}): {problem.words}"


def _prompts(forecast: Forecast) -> str:
    mean = forecast.prompt_tokens / forecast.rows_running
    return f"{forecast.prompt_tokens:,} tokens, {mean:,.1f} a row, {forecast.longest_prompt:,} at most"


def _hits(forecast: Forecast, hit_tokens: int, *, is_on: bool) -> str:
    if not is_on:
        return f"none, as engine.prefix_cache is false: {forecast.prompt_tokens:,} tokens to compute"
    share = hit_tokens / forecast.prompt_tokens
    return (
        f"highest possible within windows {share:.1%}: {hit_tokens:,} tokens from the cache, "
        f"{forecast.prompt_tokens - hit_tokens:,} to compute"
    )


def _output(forecast: Forecast, config: RunConfig) -> str:
    completions = forecast.rows_running * config.sampling.n
    return f"{forecast.output_tokens:,} tokens at most, in {completions:,} completions"


def _pool(pool: PoolEstimate, config: RunConfig) -> str:
    at_most = "at most " if pool.is_bound else ""
    size = f"{at_most}{pool.num_blocks:,} blocks of {config.engine.block_size} tokens, {pool.pool / _GIB:,.2f} GiB"
    beside = f"beside {pool.weights / _GIB:,.2f} GiB of weights"
    if pool.fits:
        return f"{size} {beside}"
    return f"{size}, more than the {pool.room / _GIB:,.2f} GiB that this machine has {beside}"


def _largest(forecast: Forecast, pool: PoolEstimate, config: RunConfig) -> str:
    samples = f" for its {config.sampling.n} samples" if config.sampling.n > 1 else ""
    return f"{forecast.longest_blocks:,} blocks{samples}, {forecast.longest_blocks / pool.num_blocks:.1%} of the pool"


def _at_once(forecast: Forecast, pool: PoolEstimate, hit_blocks: int, samples: int, max_seqs: int) -> str:
    """How many rows fit at a time if all had the mean length, each at its most tokens."""
    apart = pool.num_blocks * forecast.rows_running // forecast.blocks
    # A block less for each that is shared: as if the first of them were somebody else's.
    shared = pool.num_blocks * forecast.rows_running // max(1, forecast.blocks - hit_blocks)
    return (
        f"{apart:,} rows of mean size at full length fit, about {shared:,} with shared blocks held once; "
        f"engine.max_seqs {max_seqs:,}{f' for {samples} samples a row' if samples > 1 else ''}"
    )
