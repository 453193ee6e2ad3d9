"""What a shard did: kept as JSON, and told in a few lines at the end of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.layout import ShardLayout
from runner.storage import make_folder, write_json

GENERATE = "generate"
"""The phase in `Summary.seconds` in which steps run; token rates are over it."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The figures of one run of a shard.

    `highest_hit_rate` (H*) and `hit_rate` are shares of the prompt tokens, 0 to 1. `mean_live_fraction`
    is over the steps with rows waiting if `rows_waited`, else over all steps. `memory_plan` and
    `peak_bytes` are bytes (peak 0: not measured, on a CPU); `seconds` are by phase.
    """

    rows: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    output_tokens: int
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


def write_summary(out: Path, shard_index: int, summary: Summary) -> None:
    """Write `summary/shard-NNNNN.json` in the output folder, whole or not at all.

    Raises:
        StorageError: it could not be written.
    """
    path = ShardLayout(out, shard_index).summary_file
    make_folder(path.parent)
    write_json(path, dataclasses.asdict(summary))


def render_summary(summary: Summary) -> str:
    """The summary as lines of text."""
    lines = [
        ("rows", f"{summary.rows:,}, {summary.errors:,} with an error"),
        ("tokens", _tokens(summary)),
        ("speed", _speed(summary)),
        ("prefix hits", f"{summary.hit_rate:.1%} of prompt tokens, highest possible {summary.highest_hit_rate:.1%}"),
        ("pool", _pool(summary)),
        ("memory", _memory(summary)),
        ("seconds", ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in summary.seconds.items())),
        ("device", summary.device),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines if text)


def _tokens(summary: Summary) -> str:
    return (
        f"{summary.prompt_tokens:,} prompt ({summary.cached_tokens:,} from the cache), "
        f"{summary.output_tokens:,} output, {summary.recomputed_tokens:,} computed again"
    )


def _speed(summary: Summary) -> str:
    seconds = summary.seconds.get(GENERATE, 0.0)
    if seconds <= 0:
        return ""
    prompt, output = summary.prompt_tokens / seconds, summary.output_tokens / seconds
    return f"{prompt:,.1f} prompt and {output:,.1f} output tokens per second"


def _pool(summary: Summary) -> str:
    when = "while rows waited" if summary.rows_waited else "over all steps (no row waited)"
    return (
        f"{summary.mean_live_fraction:.1%} live {when}; {summary.steps:,} steps, "
        f"{summary.preemptions:,} preemptions, {summary.evictions:,} evictions"
    )


def _memory(summary: Summary) -> str:
    plan = [f"{name} {size / _MIB:,.0f} MiB" for name, size in summary.memory_plan.items() if size]
    peak = [f"peak {summary.peak_bytes / _MIB:,.0f} MiB"] if summary.peak_bytes else []
    return ", ".join([*plan, *peak])
