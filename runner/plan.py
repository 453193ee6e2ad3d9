"""The order in which the prompts of a window enter the engine, and the prefix reuse it allows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

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


def highest_hit_tokens(prompts: Sequence[TokenIds], block_size: int) -> int:
    """The most prompt tokens that any schedule can take from the prefix cache, given prompts in prefix order.

    In that order a prompt shares no more with any prompt before it than with the one just before. Only
    whole blocks are shared, and the last token of a prompt is always computed.
    """
    blocks = 0
    for previous, prompt in pairwise(prompts):
        shared = _common_prefix(previous, prompt[: len(prompt) - 1])
        blocks += shared // block_size
    return blocks * block_size


def _common_prefix(one: TokenIds, other: TokenIds) -> int:
    """How many leading tokens two prompts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
