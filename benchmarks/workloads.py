"""Prompts as token ids, with fixed output lengths, the same for every engine that is measured."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.request import Reuse, TokenIds
from runner.plan import highest_hit_tokens, order_rows, plan_prompts

LARGEST_ID = 19_999
"""No workload uses a larger token id, so that any model's vocabulary will do."""


class Work(NamedTuple):
    """One request: int32 [tokens], and how many new tokens to make, whatever they are."""

    prompt: TokenIds
    new_tokens: int


def nano(scale: float = 1.0) -> list[Work]:
    """The public nano-vllm offline benchmark: 256 prompts of 100..1,024 tokens, 100..1,024 new, nothing shared."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(_count(256, scale))]
    return [Work(np.array(prompt, np.int32), rng.randint(100, 1024)) for prompt in prompts]


def onesys(scale: float = 1.0) -> list[Work]:
    """One system prompt: 4,096 prompts of 2,000 shared and 100 own tokens, 128 new."""
    rng = np.random.default_rng(1)
    system = _draw(rng, 2000)
    return [_behind(system, _draw(rng, 100), 128) for _ in range(_count(4096, scale))]


def chat(scale: float = 1.0) -> list[Work]:
    """2,048 prompts and outputs of log-normal lengths (means about 230 and 200), as in ShareGPT; nothing shared."""
    rng = np.random.default_rng(2)
    count = _count(2048, scale)
    prompt_lens = np.clip(rng.lognormal(4.7, 1.2, count), 4, 4096).astype(int)
    output_lens = np.clip(rng.lognormal(4.9, 0.9, count), 4, 2048).astype(int)
    return [Work(_draw(rng, prompt), output) for prompt, output in zip(prompt_lens, output_lens.tolist(), strict=True)]


def rag(scale: float = 1.0) -> list[Work]:
    """Retrieval: 500 documents of 3,000 tokens, 8 questions of 50 on each, 64 new; shuffled."""
    return _shuffled_groups(3, _count(500, scale), prefix=3000, own=50, new_tokens=64)


def groups(scale: float = 1.0) -> list[Work]:
    """The shape of vLLM pull request 13762: 100 groups of 8, 2,000 shared and 200 own tokens, 100 new; shuffled."""
    return _shuffled_groups(123, _count(100, scale), prefix=2000, own=200, new_tokens=100)


WORKLOADS: dict[str, Callable[[float], list[Work]]] = {
    "nano": nano,
    "onesys": onesys,
    "chat": chat,
    "rag": rag,
    "groups": groups,
}
"""Each takes the share of its requests to make, at least one (request or group)."""


ORDERS = ("sorted", "shuffled", "question-major")
"""As `ordered` knows them."""
GROUP_TOKENS = 16
"""Prompts that start with the same so many tokens are of one group: drawn ids never agree so far by chance."""


def in_prefix_order(work: list[Work]) -> list[Work]:
    """The order in which a job runs them: prompts that share a prefix are neighbours."""
    return [work[row] for row in order_rows([item.prompt for item in work], "prefix")]


def ordered(work: list[Work], order: str) -> list[Work]:
    """The requests in one of `ORDERS`.

    "sorted" is prefix order, "shuffled" the order in which the workload is made, and "question-major" takes the first
    request of every group, then the second of each, and so on: every document's question i before any question i + 1.

    Raises:
        ValueError: another `order`.
    """
    if order == "sorted":
        return in_prefix_order(work)
    if order == "shuffled":
        return work
    if order == "question-major":
        return _in_turn(in_prefix_order(work))
    raise ValueError(f"order {order!r}; accepted: {', '.join(ORDERS)}")


def planned(work: list[Work], order: str, block_size: int) -> list[tuple[Work, tuple[Reuse, ...]]]:
    """The requests in one of `ORDERS`, each with what is needed again of its prompt (`Request.reuse`).

    Raises:
        ValueError: another `order`.
    """
    if order == "sorted":  # planning sorts, too: once is enough
        plan = plan_prompts([item.prompt for item in work], "prefix", block_size)
        in_order = [work[row] for row in plan.order]
    else:
        in_order = ordered(work, order)
        plan = plan_prompts([item.prompt for item in in_order], "input", block_size)
    return list(zip(in_order, plan.reuse, strict=True))


def _in_turn(work: list[Work]) -> list[Work]:
    """One request of each group by turns; groups and the requests of each keep their order."""
    turns: list[list[Work]] = []
    seen: Counter[bytes] = Counter()
    for item in work:
        group = item.prompt[:GROUP_TOKENS].tobytes()
        if seen[group] == len(turns):
            turns.append([])
        turns[seen[group]].append(item)
        seen[group] += 1
    return [item for turn in turns for item in turn]


def totals(work: list[Work], block_size: int) -> dict[str, float]:
    """Requests, tokens, and the highest share of prompt tokens that any schedule can find in the prefix cache."""
    prompt_tokens = sum(len(item.prompt) for item in work)
    hits = highest_hit_tokens([item.prompt for item in in_prefix_order(work)], block_size)
    return {
        "requests": len(work),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(item.new_tokens for item in work),
        "highest_hit_rate": round(hits / prompt_tokens, 4),
    }


def _shuffled_groups(seed: int, count: int, *, prefix: int, own: int, new_tokens: int, size: int = 8) -> list[Work]:
    """`count` groups of `size` prompts behind a prefix of their group."""
    rng = np.random.default_rng(seed)
    work: list[Work] = []
    for _ in range(count):
        shared = _draw(rng, prefix)
        work += [_behind(shared, _draw(rng, own), new_tokens) for _ in range(size)]
    rng.shuffle(work)
    return work


def _behind(prefix: TokenIds, own: TokenIds, new_tokens: int) -> Work:
    return Work(np.concatenate((prefix, own)), new_tokens)


def _draw(rng: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
    return rng.integers(1, LARGEST_ID + 1, count).astype(np.int32)  # as int64: another dtype would draw other ids


def _count(full: int, scale: float) -> int:
    if not scale > 0:  # nor NaN
        raise ValueError(f"scale {scale}: must be above 0")
    return max(1, int(full * scale))
