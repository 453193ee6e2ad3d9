"""What a shard did: kept as JSON, and told in a few lines at the end of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.step_totals import Occupancy

GENERATE = "generate"
"""The phase in `Summary.seconds` in which steps run; token rates are over it."""

PUBLISH = "publish"
"""The phase in which the final files are written."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The figures of one shard, when it is complete.

    The job may have been interrupted and resumed. `rows`, their `completions` (the samples of each), the
    `errors` among those, and the prompt, cached and output tokens are of the whole job; all else is of its
    last attempt, which finished `attempt_rows` of the rows with `attempt_prompt_tokens` and
    `attempt_output_tokens`. A prompt counts once, however many samples its row has.

    `hit_rate` (at first admission) and `highest_hit_rate` (H*) are shares of the prompt tokens, 0 to 1;
    `inflight_hit_rate` is the part of `hit_rate` found in blocks that the same step filled. H* is of each window
    on its own: where windows share a prefix, `hit_rate` may exceed it. `missed_hit_tokens` are in H* and
    were computed all the same, evicted before their use as a rule; `recomputed_tokens` were computed once
    more after a preemption, and are in none of these.

    The pool is described by means over step time. `occupancy` is over all steps, `waiting_occupancy` over those
    with rows waiting, None where none ever did; `mean_live_fraction` is the live share of the latter if
    `rows_waited`, else of the former. `slack_fraction` is the share of the slots of live blocks that hold no
    token; `shared_blocks` are the references to live blocks beyond the first of each, so blocks saved, and
    `shared_fraction` their share of what the same sequences would hold without sharing. `duplicate_blocks` were
    filled with tokens that another block holds, too, `copied_blocks` for samples that parted.

    `memory_plan` and `peak_bytes` are bytes (peak 0: not measured, on a CPU); `seconds` are by phase.
    """

    rows: int
    completions: int
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
    inflight_hit_rate: float
    missed_hit_tokens: int
    steps: int
    mean_live_fraction: float
    rows_waited: bool
    occupancy: Occupancy
    waiting_occupancy: Occupancy | None
    slack_fraction: float
    shared_blocks: float
    shared_fraction: float
    duplicate_blocks: int
    copied_blocks: int
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
        ("blocks", _blocks(summary), attempt),
        ("steps", _steps(summary), attempt),
        ("memory", _memory(summary), ""),
        ("seconds", ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in summary.seconds.items()), attempt),
        ("device", summary.device, ""),
    ]
    return "\n".join(f"{name:<12} {text}{scope}" for name, text, scope in lines if text)


def _rows(summary: Summary) -> str:
    earlier = summary.rows - summary.attempt_rows
    samples = f", {summary.completions:,} completions" if summary.completions > summary.rows else ""
    resumed = f", {earlier:,} from earlier attempts" if earlier else ""
    return f"{summary.rows:,}{samples}, {summary.errors:,} with an error{resumed}"


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
    return (
        f"{summary.hit_rate:.1%} of prompt tokens ({summary.inflight_hit_rate:.1%} in the step that fills them); "
        f"highest possible within windows {summary.highest_hit_rate:.1%}, {summary.missed_hit_tokens:,} missed"
    )


def _pool(summary: Summary) -> str:
    shares, when = summary.waiting_occupancy, "while rows waited"
    if shares is None:
        shares, when = summary.occupancy, "over all steps (no row waited)"
    overall = f"; {summary.occupancy.live:.1%} live over all steps" if summary.rows_waited else ""
    return f"{shares.live:.1%} live, {shares.cached:.1%} cached, {shares.free:.1%} free {when}{overall}"


def _blocks(summary: Summary) -> str:
    copied = f", {summary.copied_blocks:,} copied" if summary.copied_blocks else ""
    return (
        f"{summary.shared_blocks:,.1f} saved by sharing on average ({summary.shared_fraction:.1%}), "
        f"{summary.slack_fraction:.1%} of slots unused, {summary.duplicate_blocks:,} duplicate{copied}"
    )


def _steps(summary: Summary) -> str:
    return (
        f"{summary.steps:,}, {summary.preemptions:,} preemptions "
        f"({summary.recomputed_tokens:,} tokens computed again), {summary.evictions:,} evictions"
    )


def _memory(summary: Summary) -> str:
    plan = [f"{name} {size / _MIB:,.0f} MiB" for name, size in summary.memory_plan.items() if size]
    peak = [f"peak {summary.peak_bytes / _MIB:,.0f} MiB"] if summary.peak_bytes else []
    return ", ".join([*plan, *peak])
