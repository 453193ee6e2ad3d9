"""Running sums over engine steps, for the progress line and the summary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from engine.stats import StepStats


@dataclass(frozen=True)
class Occupancy:
    """Mean shares of the pool's blocks over some time, each 0 to 1.

    `live` are held by running sequences, `cached` by none but reusable, `free` neither.
    """

    live: float
    cached: float
    free: float


@dataclass
class StatsTotals:
    """Sums over the steps added so far; `*_us` are microseconds of step time, of shares and counts their product.

    What describes the pool is a mean weighted by step time: a long step counts for as long as it took.
    `waiting_*` are of the steps that were launched while rows waited for room.
    """

    steps: int = 0
    duration_us: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    dropped_tokens: int = 0
    cached_tokens: int = 0
    inflight_hit_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    duplicate_blocks: int = 0
    copied_blocks: int = 0
    live_us: float = 0.0
    cached_us: float = 0.0
    free_us: float = 0.0
    waiting_us: int = 0
    waiting_live_us: float = 0.0
    waiting_cached_us: float = 0.0
    waiting_free_us: float = 0.0
    live_blocks_us: int = 0
    shared_blocks_us: int = 0
    slack_tokens_us: int = 0

    def add(self, stats: StepStats) -> None:
        """Count one more step."""
        duration = stats.duration_us
        self.steps += 1
        self.duration_us += duration
        self.prefill_tokens += stats.prefill_tokens
        self.decode_tokens += stats.decode_tokens
        self.dropped_tokens += stats.dropped_tokens
        self.cached_tokens += stats.cached_tokens
        self.inflight_hit_tokens += stats.inflight_hit_tokens
        self.recomputed_tokens += stats.recomputed_tokens
        self.evictions += stats.evictions
        self.preemptions += stats.preemptions
        self.duplicate_blocks += stats.duplicate_blocks
        self.copied_blocks += stats.copied_blocks
        self.live_blocks_us += stats.blocks_live * duration
        self.shared_blocks_us += stats.shared_blocks * duration
        self.slack_tokens_us += stats.slack_tokens * duration
        self._add_occupancy(stats)

    def _add_occupancy(self, stats: StepStats) -> None:
        weight = stats.duration_us / stats.blocks_total
        live, cached, free = (weight * blocks for blocks in (stats.blocks_live, stats.blocks_cached, stats.blocks_free))
        self.live_us += live
        self.cached_us += cached
        self.free_us += free
        if stats.waiting > 0:
            self.waiting_us += stats.duration_us
            self.waiting_live_us += live
            self.waiting_cached_us += cached
            self.waiting_free_us += free

    def copy(self) -> Self:
        """The sums as they are now."""
        return dataclasses.replace(self)

    def since(self, earlier: StatsTotals) -> StatsTotals:
        """The sums over the steps added after `earlier` was copied."""
        names = [field.name for field in dataclasses.fields(self)]
        return StatsTotals(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def input_tokens(self) -> int:
        """Prompt tokens dealt with: found in the cache or computed for the first time."""
        return self.cached_tokens + self.prefill_tokens - self.recomputed_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens written by decoding, those past a row's end left out.

        The first token of each of a row's samples is not among them: the row's prefill writes it.
        """
        return self.decode_tokens - self.dropped_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found in the cache at first admission, 0 to 1; 0 without any."""
        return _ratio(self.cached_tokens, self.input_tokens)

    @property
    def inflight_hit_rate(self) -> float:
        """The part of `hit_rate` that was found in blocks which the very same step filled."""
        return _ratio(self.inflight_hit_tokens, self.input_tokens)

    @property
    def live_fraction(self) -> float:
        """Mean share of the pool held by running sequences, over all steps, 0 to 1; 0 without any."""
        return _ratio(self.live_us, self.duration_us)

    @property
    def mean_live_fraction(self) -> float:
        """The mean share while rows waited; where none ever did (see `rows_waited`), over all steps."""
        return _ratio(self.waiting_live_us, self.waiting_us) if self.rows_waited else self.live_fraction

    @property
    def rows_waited(self) -> bool:
        """Whether any step was launched while rows waited for room."""
        return self.waiting_us > 0

    @property
    def occupancy(self) -> Occupancy:
        """The pool over all steps."""
        return Occupancy(*(_ratio(each, self.duration_us) for each in (self.live_us, self.cached_us, self.free_us)))

    @property
    def waiting_occupancy(self) -> Occupancy | None:
        """The pool while rows waited; None where none ever did."""
        if not self.rows_waited:
            return None
        shares = (self.waiting_live_us, self.waiting_cached_us, self.waiting_free_us)
        return Occupancy(*(_ratio(each, self.waiting_us) for each in shares))

    @property
    def shared_blocks(self) -> float:
        """Mean number of blocks that sharing saves: references to live blocks beyond the first of each."""
        return _ratio(self.shared_blocks_us, self.duration_us)

    @property
    def shared_fraction(self) -> float:
        """Blocks saved by sharing as a share of those that the same sequences would hold without, 0 to 1."""
        return _ratio(self.shared_blocks_us, self.shared_blocks_us + self.live_blocks_us)

    def slack_fraction(self, block_size: int) -> float:
        """Unused slots as a share of the slots of live blocks, 0 to 1."""
        return _ratio(self.slack_tokens_us, self.live_blocks_us * block_size)


def _ratio(part: float, whole: float) -> float:
    """`part` of `whole`; 0 of nothing."""
    return part / whole if whole else 0.0
