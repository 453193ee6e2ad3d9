"""What a shard did: kept as JSON, and told in a few lines at the end of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GENERATE = "generate"
"""The phase in `Summary.seconds` in which steps run; token rates are over it."""

PUBLISH = "publish"
"""The phase in which the final files are written."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The figures of one shard, when it is complete.

    The job may have been interrupted and resumed. `rows`, `errors` and the prompt, cached and output
    tokens are of the whole job; all else is of its last attempt, which finished `attempt_rows` of the
    rows with `attempt_prompt_tokens` and `attempt_output_tokens`.

    `hit_rate` and `highest_hit_rate` (H*) are shares of the prompt tokens, 0 to 1. H* is of each window
    on its own: where windows share a prefix, `hit_rate` may exceed it. `mean_live_fraction` is over the
    steps with rows waiting if `rows_waited`, else over all steps. `memory_plan` and `peak_bytes` are
    bytes (peak 0: not measured, on a CPU); `seconds` are by phase.
    """

    rows: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempt_rows: int
    attempt_prompt_tokens: int
    attempt_output_tokens: int
    recomputed_tokens: int
    highest_hit_rate: float
    hit_rate: float
    steps: int
    mean_live_fraction: float
    rows_waited: bool
    preemptions: int
    evictions: int
    memory_plan: Mapping[str, int]
    peak_bytes: int
    seconds: Mapping[str, float]
    versions: Mapping[str, str]
    device: str


def render_summary(summary: Summary) -> str:
    """The summary as lines of text; after a resumption each line says what it is of."""
    whole, attempt = "", ""
    if summary.attempt_rows < summary.rows:
        whole, attempt = " (whole job)", " (this attempt)"
    lines = [
        ("rows", _rows(summary), whole),
        ("tokens", _tokens(summary), whole),
        ("speed", _speed(summary), attempt),
        ("prefix hits", _prefix_hits(summary), attempt),
        ("pool", _pool(summary), attempt),
        ("memory", _memory(summary), ""),
        ("seconds", ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in summary.seconds.items()), attempt),
        ("device", summary.device, ""),
    ]
    return "\n".join(f"{name:<12} {text}{scope}" for name, text, scope in lines if text)


def _rows(summary: Summary) -> str:
    earlier = summary.rows - summary.attempt_rows
    resumed = f", {earlier:,} from earlier attempts" if earlier else ""
    return f"{summary.rows:,}, {summary.errors:,} with an error{resumed}"


def _tokens(summary: Summary) -> str:
    return (
        f"{summary.prompt_tokens:,} prompt ({summary.cached_tokens:,} from the cache), {summary.output_tokens:,} output"
    )


def _speed(summary: Summary) -> str:
    seconds = summary.seconds.get(GENERATE, 0.0)
    if seconds <= 0:
        return ""
    prompt, output = summary.attempt_prompt_tokens / seconds, summary.attempt_output_tokens / seconds
    return f"{prompt:,.1f} prompt and {output:,.1f} output tokens per second"


def _prefix_hits(summary: Summary) -> str:
    return f"{summary.hit_rate:.1%} of prompt tokens, highest possible within windows {summary.highest_hit_rate:.1%}"


def _pool(summary: Summary) -> str:
    when = "while rows waited" if summary.rows_waited else "over all steps (no row waited)"
    return (
        f"{summary.mean_live_fraction:.1%} live {when}; {summary.steps:,} steps, {summary.preemptions:,} preemptions "
        f"({summary.recomputed_tokens:,} tokens computed again), {summary.evictions:,} evictions"
    )


def _memory(summary: Summary) -> str:
    plan = [f"{name} {size / _MIB:,.0f} MiB" for name, size in summary.memory_plan.items() if size]
    peak = [f"peak {summary.peak_bytes / _MIB:,.0f} MiB"] if summary.peak_bytes else []
    return ", ".join([*plan, *peak])
