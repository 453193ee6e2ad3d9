"""How close prefix reuse comes to H*, the most that any schedule can reach, over an engine without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.null_executor import NullExecutor
from benchmarks.workloads import WORKLOADS
from engine.engine import Engine
from engine.request import Request, Sampling, TokenIds
from engine.scheduler import Limits
from runner.plan import highest_hit_tokens, plan_prompts

NEW_TOKENS = 6
LIMITS = Limits(max_seqs=6, max_batch_tokens=8192, max_model_len=8192)
REACHED = 0.995

Prompts = list[TokenIds]


def draw(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(1, 20_000, count).astype(np.int32)


def continued(prompts: Prompts, rng: np.random.Generator, branches: int, tokens: int) -> Prompts:
    return [np.concatenate((prompt, draw(rng, tokens))) for prompt in prompts for _ in range(branches)]


def three_levels(block_size: int) -> Prompts:
    rng = np.random.default_rng(0)
    level = [draw(rng, 3 * block_size + 5)]
    for branches, blocks in ((3, 2), (3, 4)):
        level = continued(level, rng, branches, blocks * block_size + 3)
    return continued(level, rng, 4, block_size)


def duplicates(block_size: int) -> Prompts:
    rng = np.random.default_rng(1)
    return [prompt for _ in range(8) for prompt in [draw(rng, 3 * block_size + int(rng.integers(block_size)))] * 4]


def ends_at_block_boundaries(block_size: int) -> Prompts:
    """Prompts of whole blocks, each several times, beside their own extensions by whole blocks."""
    rng = np.random.default_rng(2)
    roots = [draw(rng, 2 * block_size) for _ in range(4)]
    longer = continued(roots, rng, 2, block_size)
    return 3 * roots + 2 * longer + continued(longer, rng, 2, block_size)


def workload(name: str, scale: float) -> Callable[[int], Prompts]:
    return lambda block_size: [item.prompt for item in WORKLOADS[name](scale)]


KINDS: dict[str, Callable[[int], Prompts]] = {
    "rag": workload("rag", 0.008),
    "groups": workload("groups", 0.03),
    "onesys": workload("onesys", 0.007),
    "three levels": three_levels,
    "duplicates": duplicates,
    "block boundaries": ends_at_block_boundaries,
}


def hit_tokens(
    prompts: Sequence[TokenIds],
    block_size: int,
    num_blocks: int,
    *,
    by: str = "prefix",
    planned: bool = True,
    limits: Limits = LIMITS,
    async_steps: bool = False,
) -> int:
    """Prompt tokens found at first admission when a window of `prompts` is run to its end."""
    plan = plan_prompts(prompts, by, block_size)
    engine = Engine(NullExecutor(), limits, num_blocks=num_blocks, block_size=block_size, async_steps=async_steps)
    for row, reuse in zip(plan.order.tolist(), plan.reuse, strict=True):
        sampling = Sampling(max_tokens=NEW_TOKENS)
        engine.add(Request(row, prompts[row], sampling, reuse=reuse if planned else ()))
    found = completed = 0
    while engine.has_work:
        result = engine.step()
        completed += len(result.completions)
        assert all(completion.error is None for completion in result.completions)
        found += result.stats.cached_tokens if result.stats is not None else 0
    assert completed == len(prompts)
    return found


def highest(prompts: Sequence[TokenIds], block_size: int) -> int:
    return highest_hit_tokens([prompts[row] for row in plan_prompts(prompts, "prefix", block_size).order], block_size)


def blocks_of_longest(prompts: Sequence[TokenIds], block_size: int) -> int:
    return -(-(max(map(len, prompts)) + NEW_TOKENS) // block_size)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_prefix_order_find_all_that_can_be_found_in_any_pool_that_holds_their_paths(
    kind: str, block_size: int
) -> None:
    prompts = KINDS[kind](block_size)
    shuffled = [prompts[row] for row in np.random.default_rng(7).permutation(len(prompts))]
    one = blocks_of_longest(prompts, block_size)
    most = highest(prompts, block_size)
    assert most > 0
    for rows, num_blocks, async_steps in (
        (prompts, one, False),
        (shuffled, one + 2, True),
        (shuffled, 3 * one, False),
        (prompts, 20 * one, True),
    ):
        found = hit_tokens(rows, block_size, num_blocks, async_steps=async_steps)
        assert REACHED * most <= found <= most, (num_blocks, async_steps)


@pytest.mark.parametrize("kind", ["three levels", "block boundaries"])
def test_prompts_that_take_several_chunks_are_found_no_less(kind: str) -> None:
    prompts = KINDS[kind](32)
    limits = Limits(max_seqs=6, max_batch_tokens=100, max_model_len=8192)
    most = highest(prompts, 32)
    for num_blocks in (blocks_of_longest(prompts, 32), 200):
        for async_steps in (False, True):
            found = hit_tokens(prompts, 32, num_blocks, limits=limits, async_steps=async_steps)
            assert REACHED * most <= found <= most


def question_major(documents: int, tokens: int, questions: int) -> Prompts:
    """The first question on every document, then the second one, ..."""
    rng = np.random.default_rng(3)
    texts = [draw(rng, tokens) for _ in range(documents)]
    return [np.concatenate((text, draw(rng, 20))) for _ in range(questions) for text in texts]


def test_in_question_major_order_half_the_documents_blocks_bring_half_the_hits_if_the_plan_is_known() -> None:
    documents, tokens, block_size = 40, 480, 16
    prompts = question_major(documents, tokens, questions=8)
    most = highest(prompts, block_size)
    running = LIMITS.max_seqs * blocks_of_longest(prompts, block_size)
    pool = documents * tokens // block_size // 2 + running
    assert hit_tokens(prompts, block_size, pool, by="input") >= 0.48 * most
    assert hit_tokens(prompts, block_size, pool, by="input", planned=False) <= 0.01 * most
