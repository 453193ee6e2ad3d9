"""Which later prompts need which of a prompt's blocks: against the definition, in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Reuse
from runner.plan import order_rows, plan_prompts, shared_with_previous
from runner.reuse import Uses, plan_reuse

# Few different tokens, so that random prompts share prefixes, end inside each other and repeat.
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=14)


def reuse_in(run: list[list[int]], block: int) -> list[Uses]:
    """The plan for prompts that run in this order."""
    return plan_prompts([np.array(prompt, np.int32) for prompt in run], "input", block).reuse


def definition(run: list[list[int]], at: int, block: int) -> list[tuple[int, int]]:
    """(leading tokens, distance of the first later prompt that finds them) for every number of full blocks."""
    uses = []
    common = min((shared(one, run[0]) for one in run), default=0) // block * block
    for tokens in range(block, len(run[at]) + 1, block):
        later = [
            distance
            for distance, other in enumerate(run[at + 1 :], 1)
            if min(shared(run[at], other), len(other) - 1) >= tokens
        ]
        if len(run) > 1 and tokens <= common:
            later.append(len(run) - at)  # the next window
        if later:
            uses.append((tokens, min(later)))
    return uses


def shared(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def expanded(uses: Uses, block: int) -> list[tuple[int, int]]:
    """The distance for every number of full blocks that has one."""
    deepest = max((each.tokens for each in uses), default=0)
    return [
        (tokens, min(each.distance for each in uses if each.tokens >= tokens))
        for tokens in range(block, deepest + 1, block)
    ]


@given(PROMPTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_plan_names_the_first_later_prompt_that_finds_each_block(
    run: list[list[int]], block: int, rng: random.Random
) -> None:
    rng.shuffle(run)
    for at, uses in enumerate(reuse_in(run, block)):
        assert expanded(uses, block) == definition(run, at, block)
        assert list(uses) == sorted(uses, key=lambda each: (each.tokens, each.distance))
        assert len({each.tokens for each in uses}) == len({each.distance for each in uses}) == len(uses)


@given(PROMPTS, st.integers(1, 4))
def test_a_window_plans_in_the_order_in_which_it_runs(prompts: list[list[int]], block: int) -> None:
    plan = plan_prompts([np.array(prompt, np.int32) for prompt in prompts], "prefix", block)
    assert plan.reuse == reuse_in([prompts[row] for row in plan.order.tolist()], block)


def test_a_prompt_that_ends_with_a_shared_block_does_not_come_for_it() -> None:
    run = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [7]]
    assert reuse_in(run, 2)[0] == (Reuse(2, 1), Reuse(4, 2))
    assert reuse_in(run, 2)[1] == (Reuse(4, 1),)


def test_what_a_whole_window_shares_is_needed_by_the_next_one() -> None:
    run = [[9, 9, 1, 1], [9, 9, 2, 2], [9, 9, 1, 1, 3]]
    assert reuse_in(run, 2) == [(Reuse(2, 1), Reuse(4, 2)), (Reuse(2, 1),), (Reuse(2, 1),)]
    assert reuse_in(run[:1], 2) == [()], "a single prompt says nothing of the next window"


def test_equal_plans_are_one_object() -> None:
    run = [[row, row, question] for question in range(3) for row in range(50)]
    plans = reuse_in(run, 2)
    assert set(plans) == {(Reuse(2, 50),), ()}
    assert len({id(uses) for uses in plans}) == 2


@pytest.mark.parametrize("by", ["prefix", "input", "longest"])
def test_no_prompts_have_an_empty_plan(by: str) -> None:  # trap 54
    plan = plan_prompts([], by, 16)
    assert (plan.order.tolist(), plan.reuse, plan.highest_hit_tokens) == ([], [], 0)


def test_a_chain_of_prompts_that_each_continue_the_last_is_planned_level_by_level() -> None:
    prompts = [np.arange(length, dtype=np.int32) for length in range(1, 200)]
    lengths = np.array([len(prompt) for prompt in prompts])
    assert order_rows(prompts, "prefix").tolist() == list(range(len(prompts)))
    uses = plan_reuse(lengths, shared_with_previous(prompts), np.arange(len(prompts))[::-1].copy(), 1)
    assert uses[:197] == [(Reuse(length - 2, 1),) for length in range(199, 2, -1)]
