"""Memory and work of one engine step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One launched step; block counts are the state at launch.

    `prefill_tokens` are prompt and resumed tokens computed in the step and `recomputed_tokens` the
    part of them that had been computed before. `cached_tokens` are prompt tokens found in the prefix
    cache and `inflight_hit_tokens` the part of them that this very step fills. `dropped_tokens` were drawn
    for sequences that had ended before, which was not known at launch. Over a job,
    sum(cached) + sum(prefill - recomputed) is the number of prompt tokens of the rows that ran.
    Blocks are live (held by a running sequence), cached (unreferenced, reusable) or free.
    `slack_tokens` are the unused slots of live blocks. `shared_blocks` counts the references to live blocks beyond
    the first of each: blocks that sharing saves. `duplicate_blocks` are full prompt blocks that the step fills
    although others hold the same tokens, `copied_blocks` those copied because a sample writes into a shared one.
    Bytes are the CUDA allocator's, 0 on a CPU.
    """

    step: int
    started_at: int  # microseconds since the epoch, UTC
    duration_us: int
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    dropped_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    inflight_hit_tokens: int
    blocks_total: int
    blocks_live: int
    blocks_cached: int
    blocks_free: int
    slack_tokens: int
    shared_blocks: int
    duplicate_blocks: int
    copied_blocks: int
    evictions: int
    preemptions: int
    gpu_allocated_bytes: int
    gpu_reserved_bytes: int

    @property
    def live_fraction(self) -> float:
        """Share of the pool held by running sequences, 0 to 1."""
        return self.blocks_live / self.blocks_total
