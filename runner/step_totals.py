"""Running sums over engine steps, for the progress line and the summary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from engine.stats import StepStats


@dataclass
class StatsTotals:
    """Sums over the steps added so far; `*_us` are microseconds of step time.

    The shares of the pool are means weighted by step time: a long step counts for as long as it took.
    """

    steps: int = 0
    duration_us: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    dropped_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    live_us: float = 0.0
    waiting_us: int = 0
    waiting_live_us: float = 0.0

    def add(self, stats: StepStats) -> None:
        """Count one more step."""
        self.steps += 1
        self.duration_us += stats.duration_us
        self.prefill_tokens += stats.prefill_tokens
        self.decode_tokens += stats.decode_tokens
        self.dropped_tokens += stats.dropped_tokens
        self.cached_tokens += stats.cached_tokens
        self.recomputed_tokens += stats.recomputed_tokens
        self.evictions += stats.evictions
        self.preemptions += stats.preemptions
        live_us = stats.live_fraction * stats.duration_us
        self.live_us += live_us
        if stats.waiting > 0:
            self.waiting_us += stats.duration_us
            self.waiting_live_us += live_us

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

        A row's first token is not among them: its prefill writes it.
        """
        return self.decode_tokens - self.dropped_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found in the cache, 0 to 1; 0 without any."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def live_fraction(self) -> float:
        """Mean share of the pool held by running sequences, over all steps, 0 to 1; 0 without any."""
        return self.live_us / self.duration_us if self.duration_us else 0.0

    @property
    def mean_live_fraction(self) -> float:
        """The mean share while rows waited; where none ever did (see `rows_waited`), over all steps."""
        return self.waiting_live_us / self.waiting_us if self.rows_waited else self.live_fraction

    @property
    def rows_waited(self) -> bool:
        """Whether any step was launched while rows waited for room."""
        return self.waiting_us > 0
