"""The order in which the prompts of a window enter the engine, and the prefix reuse it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt

from runner.reuse import Uses, plan_reuse

TokenIds = npt.NDArray[np.int32]
Permutation = npt.NDArray[np.int64]


def order_rows(prompts: Sequence[TokenIds], by: str) -> Permutation:
    """The permutation that puts prompts (each int32 [tokens], ids not negative) in order; equal ones keep theirs.

    `by` is "prefix" (lexicographic by token ids: a pre-order walk of the prompts' trie, a prompt before its
    own extensions), "longest" (longest first) or "input" (as they are). Sorting by prefix needs as many
    bytes again as the token ids, and about 80 bytes a prompt.

    Raises:
        ValueError: another `by`.
    """
    if by == "input":
        return np.arange(len(prompts), dtype=np.int64)
    if by == "longest":
        lengths = np.fromiter(map(len, prompts), dtype=np.int64, count=len(prompts))
        return np.argsort(-lengths, kind="stable")
    if by == "prefix":
        # Big-endian bytes of non-negative integers compare as the integers do, at the speed of memcmp.
        keys = [prompt.astype(">u4").tobytes() for prompt in prompts]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    raise ValueError(f"order {by!r}; accepted: prefix, longest, input")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the prompts of a window are run.

    `order` int64 [prompts] lists them as they enter the engine, and `reuse` what is needed again of each of these
    (`Request.reuse`). `highest_hit_tokens` are the most that any order can take from a prefix cache that starts
    empty.
    """

    order: Permutation
    reuse: list[Uses]
    highest_hit_tokens: int


def plan_prompts(prompts: Sequence[TokenIds], by: str, block_size: int) -> Plan:
    """Order prompts (as `order_rows` does) and say when each of their blocks is needed next."""
    order = order_rows(prompts, by)
    by_prefix = order if by == "prefix" else order_rows(prompts, "prefix")
    sorted_prompts = [prompts[row] for row in by_prefix.tolist()]
    lengths = np.fromiter(map(len, sorted_prompts), np.int64, len(prompts))
    shared = shared_with_previous(sorted_prompts)
    places = np.empty(len(prompts), np.int64)
    places[order] = np.arange(len(prompts))
    return Plan(order, plan_reuse(lengths, shared, places[by_prefix], block_size), _hits(lengths, shared, block_size))


def highest_hit_tokens(prompts: Sequence[TokenIds], block_size: int) -> int:
    """The most prompt tokens that any schedule can take from the prefix cache, given prompts in prefix order.

    In that order a prompt shares no more with any prompt before it than with the one just before. Only
    whole blocks are shared, and the last token of a prompt is always computed.
    """
    lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
    return _hits(lengths, shared_with_previous(prompts), block_size)


def shared_with_previous(prompts: Sequence[TokenIds]) -> npt.NDArray[np.int64]:
    """How many leading tokens each prompt has in common with the one before it; int64 [prompts], 0 for the first."""
    shared = np.zeros(len(prompts), np.int64)
    shared[1:] = np.fromiter(starmap(_common_prefix, pairwise(prompts)), np.int64, max(0, len(prompts) - 1))
    return shared


def _hits(lengths: npt.NDArray[np.int64], shared: npt.NDArray[np.int64], block_size: int) -> int:
    return int((np.minimum(shared, np.maximum(lengths - 1, 0)) // block_size).sum()) * block_size


def _common_prefix(one: TokenIds, other: TokenIds) -> int:
    """How many leading tokens two prompts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
