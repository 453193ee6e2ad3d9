"""Rows on their way from windows through the engine into the sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.engine import Engine
from engine.request import Completion, Request
from runner.config import RunConfig
from runner.interrupts import Interrupted, StopRequest
from runner.progress import Progress, Workload
from runner.prompt import RowError
from runner.sink import OutputRow, Sink
from runner.step_totals import StatsTotals
from runner.text_model import TextModel
from runner.window import ReadAhead, Window


class RowFlow:
    """Moves rows from windows through the engine into the sink; `rows_done` have output, `totals` sums the steps.

    A row is done, and goes to the sink, when all its samples are. `highest_hit_tokens` are those of the prompt
    tokens read so far that H* has, each window on its own. `rows_before` were committed by earlier attempts:
    progress counts them.
    """

    def __init__(
        self,
        engine: Engine,
        model: TextModel,
        sink: Sink,
        config: RunConfig,
        wants_token_ids: bool,
        *,
        rows_before: int = 0,
    ) -> None:
        self._engine = engine
        self._model = model
        self._sink = sink
        self._wants_token_ids = wants_token_ids
        self._max_tokens = config.sampling.max_tokens
        self._samples = config.sampling.n
        self._rows_before = rows_before
        self._requests: deque[Request] = deque()  # of the newest window, not in the engine yet
        self._open: list[Window] = []  # windows with rows that are not done, in source order
        self._rows_left: list[int] = []  # of each open window
        self._unfinished: dict[int, list[OutputRow]] = {}  # samples of rows that lack others, by row id
        self._rows_read = self._prompt_tokens = self._output_tokens = 0
        self.highest_hit_tokens = 0
        self.rows_done = 0
        self.totals = StatsTotals()

    @property
    def highest_hit_rate(self) -> float:
        """H* of the rows read, each window on its own: 0 to 1."""
        return self.highest_hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def run(self, windows: ReadAhead, rows_total: int | None, stop: StopRequest) -> None:
        """Run every row of `windows`. Raises Interrupted, with the finished rows committed, if told to stop."""
        with Progress(None if rows_total is None else self._rows_before + rows_total) as progress:
            while self._feed(windows):
                self._step()
                progress.update(self.totals, self._workload(rows_total))
                if stop:
                    break
            progress.show(self.totals, self._workload(rows_total))
        if stop:
            self._sink.commit()
            raise Interrupted

    def _feed(self, windows: ReadAhead) -> bool:
        """Keep enough requests waiting that admission never starves; whether there is anything to do."""
        while self._engine.num_waiting < 2 * self._engine.limits.max_seqs:
            if self._requests:
                self._engine.add(self._requests.popleft())
            elif (window := windows.take(wait=not self._engine.has_work)) is not None:
                self._enter(window)
            else:
                break
        return self._engine.has_work

    def _step(self) -> None:
        result = self._engine.step()
        if result.stats is not None:
            self.totals.add(result.stats)
            self._sink.record_step(result.stats)
        if finished := self._finished(result.completions):
            self._write(finished)

    def _finished(self, completions: Sequence[Completion]) -> list[OutputRow]:
        """The rows that these complete, the samples of each together."""
        if self._samples == 1:
            return [self._output_row(each) for each in completions]
        finished: list[OutputRow] = []
        for each in completions:
            samples = self._unfinished.setdefault(each.row_id, [])
            samples.append(self._output_row(each))
            if len(samples) == self._samples:
                finished += self._unfinished.pop(each.row_id)
        return finished

    def _enter(self, window: Window) -> None:
        """Take up a window; its error rows are done at once."""
        self._requests.extend(window.requests)
        self._open.append(window)
        self._rows_left.append(len(window.row_ids))
        self._rows_read += len(window.row_ids)
        self._prompt_tokens += window.prompt_tokens
        self.highest_hit_tokens += window.highest_hit_tokens
        if window.errors:
            self._write([_error_row(each, sample) for each in window.errors for sample in range(self._samples)])

    def _output_row(self, completion: Completion) -> OutputRow:
        failed = completion.finish_reason == "error"
        text = None
        if not failed and self._model.tokenizer is not None:
            text = self._model.decode(completion.token_ids.tolist())[: completion.stop_at]
        self._output_tokens += len(completion.token_ids)
        window = self._open[self._window_of(completion.row_id)]
        return OutputRow(
            row_id=completion.row_id,
            sample=completion.sample,
            completion=text,
            finish_reason=completion.finish_reason,
            error=completion.error,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            output_tokens=0 if failed else len(completion.token_ids),
            token_ids=completion.token_ids if self._wants_token_ids and not failed else None,
            prompt=window.texts.get(completion.row_id),
        )

    def _write(self, rows: Sequence[OutputRow]) -> None:
        """Hand whole rows, all samples of each, to the sink with the columns they carry, window by window."""
        at = np.array([self._window_of(row.row_id) for row in rows])
        for index in np.unique(at)[::-1].tolist():
            mine = [row for row, where in zip(rows, at.tolist(), strict=True) if where == index]
            self._sink.write(mine, self._open[index].carry([row.row_id for row in mine]))
            rows_done = len(mine) // self._samples
            self.rows_done += rows_done
            self._rows_left[index] -= rows_done
            if not self._rows_left[index]:
                del self._open[index], self._rows_left[index]

    def _window_of(self, row_id: int) -> int:
        """Which open window a row belongs to; there are two or three."""
        return next(at for at, window in enumerate(self._open) if row_id <= window.row_ids[-1])

    def _workload(self, rows_total: int | None) -> Workload:
        return Workload(
            rows_total=rows_total,
            rows_read=self._rows_read,
            prompt_tokens=self._prompt_tokens,
            rows_done=self.rows_done,
            output_tokens=self._output_tokens,
            max_tokens=self._max_tokens,
            samples=self._samples,
            rows_before=self._rows_before,
        )


def _error_row(row: RowError, sample: int) -> OutputRow:
    return OutputRow(
        row_id=row.row_id,
        sample=sample,
        completion=None,
        finish_reason="error",
        error=row.error,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=0,
        output_tokens=0,
    )
