"""Prompts as token ids, with fixed output lengths, the same for every engine that is measured."""

from __future__ import annotations

import random
from collections.abc import Callable

Workload = list[tuple[list[int], int]]
"""(prompt token ids, new tokens) of each request."""


def nano() -> Workload:
    """The public nano-vllm offline benchmark: 256 prompts of 100..1,024 tokens, 100..1,024 new, nothing shared."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


WORKLOADS: dict[str, Callable[[], Workload]] = {"nano": nano}
