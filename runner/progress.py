"""How far a job is: a bar on a terminal, a timed line in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from runner.step_totals import StatsTotals

LOG_INTERVAL_S = 10.0
_BAR_INTERVAL_S = 0.5
# Without tqdm's own time left, which counts rows.
_BAR_FORMAT = "{bar}| {desc} | {elapsed}"


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows of this attempt, as far as they are known, beside `rows_before` that earlier attempts committed.

    `rows_total` is None while the source does not know its length; `rows_read` and `prompt_tokens` are
    of the rows whose prompts have been made so far, `rows_done` and `output_tokens` of the finished
    ones; each of the `samples` of a row writes `max_tokens` at most.
    """

    rows_total: int | None
    rows_read: int
    prompt_tokens: int
    rows_done: int
    output_tokens: int
    max_tokens: int
    samples: int = 1
    rows_before: int = 0

    def tokens_left(self, totals: StatsTotals) -> float | None:
        """Tokens still to be computed; None without a basis: the number of rows, and finished rows that tell.

        The first rows to finish are the short ones. So they count as a basis once they hold half of the
        tokens written, and what the running rows have written counts towards the mean, as their lengths are
        not known yet. Rows not read yet have the mean prompt, and of prompts the share found in the cache so
        far is not computed.
        """
        if self.rows_total is None:
            return None
        rows_left = self.rows_total - self.rows_done
        if not rows_left:
            return 0.0
        # The first token of each sample comes from the row's prefill.
        written = totals.output_tokens + self.samples * self.rows_done
        running = written - self.output_tokens
        if not self.rows_done or running > self.output_tokens:
            return None
        most = self.max_tokens * self.samples
        mean_output = min(written / self.rows_done, most)
        outputs = min(mean_output * rows_left, most * rows_left - running)
        prompts = self.prompt_tokens * self.rows_total / self.rows_read
        return max(0.0, prompts - totals.input_tokens) * (1 - totals.hit_rate) + max(0.0, outputs)


class Progress:
    """Shows progress on a stream at most once per interval; `update` may be called every step.

    On a terminal it is one bar that is drawn again, elsewhere one whole line each time, without
    carriage returns. Rates and the pool's share are over the time since it was last shown. What cannot be
    written is lost: a closed or full log must not cost the job.

    Args:
        rows_total: rows of the whole job, None if not known.
        stream: where to; standard error if None.
        clock: seconds, monotonic.
        interval_s: seconds between two lines of a log.
    """

    def __init__(
        self,
        rows_total: int | None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._bar = self._open_bar(rows_total) if self._stream.isatty() else None
        self._interval_s = interval_s if self._bar is None else _BAR_INTERVAL_S
        self._started = self._shown = clock()
        self._last = StatsTotals()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, totals: StatsTotals, work: Workload) -> None:
        """Show the state if it is time to."""
        if self._clock() - self._shown >= self._interval_s:
            self.show(totals, work)

    def show(self, totals: StatsTotals, work: Workload) -> None:
        """Show the state now, as at the end of a job."""
        now = self._clock()
        text = self._text(totals, work, now)
        with contextlib.suppress(OSError):
            if self._bar is None:
                print(f"{_clock_text(now - self._started)} | {text}", file=self._stream, flush=True)
            else:
                self._bar.n = work.rows_before + work.rows_done
                self._bar.set_description_str(text, refresh=True)
        self._shown, self._last = now, totals.copy()

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def _open_bar(self, rows_total: int | None) -> tqdm | None:
        with contextlib.suppress(OSError):
            return tqdm(total=rows_total, file=self._stream, bar_format=_BAR_FORMAT, dynamic_ncols=True)
        return None

    def _text(self, totals: StatsTotals, work: Workload, now: float) -> str:
        recent = totals.since(self._last)
        seconds = now - self._shown
        return " | ".join(
            [
                f"rows {_rows_text(work)}",
                f"in {_rate(recent.input_tokens, seconds)} tok/s",
                f"out {_rate(recent.output_tokens, seconds)} tok/s",
                f"prefix hits {totals.hit_rate:.1%}",
                f"pool {recent.live_fraction:.0%} live",
                f"ETA {self._eta(totals, work, now)}",
            ]
        )

    def _eta(self, totals: StatsTotals, work: Workload, now: float) -> str:
        """The time left at the job's mean rate of computed tokens: rows differ too much in length to count them."""
        left = work.tokens_left(totals)
        done = totals.input_tokens - totals.cached_tokens + totals.output_tokens
        if left == 0:
            return _clock_text(0)
        if left is None or done == 0:
            return "unknown"
        return _clock_text(left * (now - self._started) / done)


def _rows_text(work: Workload) -> str:
    """The rows that are done, of all attempts, as the summary counts them."""
    done = work.rows_before + work.rows_done
    if work.rows_total is None:
        return f"{done:,}"
    total = work.rows_before + work.rows_total
    return f"{done:,}/{total:,} ({done / total if total else 1.0:.0%})"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds > 0 else "-"


def _clock_text(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
