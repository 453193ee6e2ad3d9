"""What goes into the engine and what comes out of it: one request, one completion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are chosen and when it ends.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 filter nothing. `stop` holds texts
    that end the row when they appear in its output; they are cut off. `min_tokens` holds back end
    tokens, stop ids and stop strings. The noise of a draw is a function of (`seed`, the request's
    `draw_id`, sample, position) alone. Raises ValueError for a temperature that is negative or not finite,
    `max_tokens` below 1 or an empty stop string.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be 0 or more, and finite")
        if self.max_tokens < 1 or not all(self.stop):
            raise ValueError(f"max_tokens {self.max_tokens} must be 1 or more, and stop strings {self.stop} not empty")


class Reuse(NamedTuple):
    """A later use of a prompt's K/V: `distance` requests after it comes one with the same first `tokens` tokens."""

    tokens: int
    distance: int


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete.

    `row_id` is the row's ordinal in the whole source; `token_ids` is int32 [prompt tokens]. `draw_id`
    is what the row is called by the random generator: the row id, unless the source has ids of its own
    that stay with a row wherever it stands. `samples` completions are drawn, from `sample` on: they share the
    blocks of the prompt, which is computed once. `reuse` is what is known of later requests, in the order in
    which they are added: for ever more leading tokens, the first one that shares them. What it does not name is
    taken as needed by none. Rows of a `group` are likely to get outputs of like lengths. `stop_after` output tokens end
    a sequence as an end token would; nothing but the check for its end looks at it, so that the engine does not know
    how long the sequence will be.

    Raises ValueError for `stop_after` below 1 or a negative `group`.
    """

    row_id: int
    token_ids: TokenIds
    sampling: Sampling
    sample: int = 0
    draw_id: int | None = None
    samples: int = 1
    reuse: tuple[Reuse, ...] = ()
    group: int | None = None
    stop_after: int | None = None

    def __post_init__(self) -> None:
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after {self.stop_after} must be 1 or more")
        if self.group is not None and self.group < 0:
            raise ValueError(f"group {self.group} must be 0 or more")


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request.

    `token_ids` is int32 [output tokens], the end or stop token included. `stop_at` is the number of
    characters of the decoded output before a stop string, None where no stop string ended it.
    `error` is set if and only if `finish_reason` is "error".
    """

    row_id: int
    sample: int
    token_ids: TokenIds
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    stop_at: int | None = None
