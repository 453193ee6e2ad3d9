"""What a job will cost and what of it cannot run, counted before any weight is read (`mode=plan`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from runner.prompt import RowError
from runner.window import Window

_ROWS_NAMED = 3
_MOST_PROBLEMS = 20
"""Kinds of problems that are told apart: a reader fixes the first few, and memory stays bounded."""
_OTHERS = "other reasons"


@dataclass
class Problem:
    """Why some rows cannot run: how many, the first of them, and the words for the first."""

    words: str
    rows: int = 0
    first_rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Forecast:
    """The rows of a job and what they ask for.

    `rows` are all, `problems` those of them that cannot run; the rest is about the others. `highest_hit_tokens`
    of their `prompt_tokens` can come from the prefix cache, each window on its own. `output_tokens` are the most
    that all samples can write. `blocks` are those of all rows at their full length, the samples of a row
    sharing the full blocks of its prompt, and `longest_blocks` those of the largest row.
    """

    rows: int
    problems: tuple[Problem, ...]
    prompt_tokens: int
    longest_prompt: int
    highest_hit_tokens: int
    output_tokens: int
    blocks: int
    longest_blocks: int

    @property
    def rows_failing(self) -> int:
        """Rows that cannot run."""
        return sum(problem.rows for problem in self.problems)

    @property
    def rows_running(self) -> int:
        """Rows that can run."""
        return self.rows - self.rows_failing


class ForecastSums:
    """Adds windows up to a forecast, in memory that does not grow with the rows.

    `max_model_len` bounds prompt and output of a row, `max_tokens` the output of each of its `samples`.
    """

    def __init__(self, *, block_size: int, max_model_len: int, max_tokens: int, samples: int) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._samples = samples
        self._problems: dict[str, Problem] = {}
        self._rows = self._prompt_tokens = self._longest_prompt = self._hit_tokens = 0
        self._output_tokens = self._blocks = self._longest_blocks = 0

    def add(self, window: Window) -> None:
        """Count one more window."""
        self._rows += len(window.row_ids)
        self._hit_tokens += window.highest_hit_tokens
        self._add_problems(window.errors)
        lengths = np.fromiter((len(each.token_ids) for each in window.requests), np.int64, len(window.requests))
        if not len(lengths):
            return
        full = np.minimum(lengths + self._max_tokens, self._max_model_len)
        shared = lengths // self._block_size
        # The last token of a sequence never takes a slot.
        blocks = shared + self._samples * (-((1 - full) // self._block_size) - shared)
        self._prompt_tokens += int(lengths.sum())
        self._longest_prompt = max(self._longest_prompt, int(lengths.max()))
        self._output_tokens += self._samples * int((full - lengths).sum())
        self._blocks += int(blocks.sum())
        self._longest_blocks = max(self._longest_blocks, int(blocks.max()))

    def total(self) -> Forecast:
        """The forecast of the windows added so far."""
        return Forecast(
            rows=self._rows,
            problems=tuple(sorted(self._problems.values(), key=lambda problem: -problem.rows)),
            prompt_tokens=self._prompt_tokens,
            longest_prompt=self._longest_prompt,
            highest_hit_tokens=self._hit_tokens,
            output_tokens=self._output_tokens,
            blocks=self._blocks,
            longest_blocks=self._longest_blocks,
        )

    def _add_problems(self, errors: Iterable[RowError]) -> None:
        """Count errors by their words, which differ in numbers where the problem is the same."""
        for error in errors:
            words = error.error.removeprefix(f"row {error.row_id}: ")
            kind = re.sub(r"\d+", "#", words)
            if kind not in self._problems and len(self._problems) >= _MOST_PROBLEMS:
                kind = words = _OTHERS
            problem = self._problems.setdefault(kind, Problem(words))
            problem.rows += 1
            if len(problem.first_rows) < _ROWS_NAMED:
                problem.first_rows.append(error.row_id)
