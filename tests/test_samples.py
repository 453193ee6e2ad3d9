"""Samples of one prompt: they share its blocks, part by copy-on-write, and each answers as if it ran alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import Completion, Request, Sampling
from engine.stats import StepStats
from tests.fake_executor import END, FailedStepError, check_invariants, expected_output, key_of, make_engine
from tests.oracle.greedy import near_ties, run, start_engine
from tests.tiny_models import save_tiny_model


def sampled(row_id: int, tokens: list[int], samples: int, **sampling: int) -> Request:
    return Request(row_id, np.array(tokens, np.int32), Sampling(**sampling), samples=samples)  # type: ignore[arg-type]


def complete(engine: Engine, requests: list[Request]) -> tuple[dict[tuple[int, int], Completion], list[StepStats]]:
    """Run to the end, every invariant checked after every step; completions by row and sample."""
    for each in requests:
        engine.add(each)
    found: dict[tuple[int, int], Completion] = {}
    steps = []
    while engine.has_work:
        try:
            result = engine.step()
        except FailedStepError:
            check_invariants(engine)
            continue
        check_invariants(engine)
        for completion in result.completions:
            assert (completion.row_id, completion.sample) not in found, "a sample came back twice"
            found[completion.row_id, completion.sample] = completion
        if result.stats is not None:
            steps.append(result.stats)
    assert engine._pool.live == 0
    assert engine._table.forks == 0
    assert len(engine._table.prefix_order.slots) == 0
    return found, steps


def check(found: dict[tuple[int, int], Completion], requests: list[Request], max_model_len: int) -> None:
    assert sorted(found) == sorted((each.row_id, sample) for each in requests for sample in range(each.samples))
    for each in requests:
        of_row = [found[each.row_id, sample] for sample in range(each.samples)]
        assert len({completion.cached_tokens for completion in of_row}) == 1
        for sample, completion in enumerate(of_row):
            alone = Request(each.row_id, each.token_ids, each.sampling, sample=sample)
            end = -1 if each.sampling.ignore_eos else END
            assert completion.token_ids.tolist() == expected_output(alone, max_model_len, end), (each.row_id, sample)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=14), st.integers(1, 5), st.integers(1, 9)),
    min_size=1,
    max_size=8,
)


@examples(max_examples=150, deadline=None)
@given(
    rows=PROMPTS,
    num_blocks=st.integers(9, 40),
    failing=st.frozensets(st.integers(0, 12), max_size=3),
    async_steps=st.booleans(),
    prefix_cache=st.booleans(),
)
def test_random_schedules_of_samples_keep_every_invariant_and_answer_as_if_alone(
    rows: list[tuple[list[int], int, int]],
    num_blocks: int,
    failing: frozenset[int],
    async_steps: bool,
    prefix_cache: bool,
) -> None:
    engine, _ = make_engine(
        num_blocks,
        max_seqs=5,
        max_batch_tokens=9,
        max_model_len=24,
        fail_steps=failing,
        async_steps=async_steps,
        prefix_cache=prefix_cache,
    )
    requests = [sampled(row, tokens, n, max_tokens=most) for row, (tokens, n, most) in enumerate(rows)]
    found, steps = complete(engine, requests)
    check(found, requests, engine.limits.max_model_len)
    if not failing:
        prompts = sum(len(each.token_ids) for each in requests)
        assert sum(step.cached_tokens + step.prefill_tokens - step.recomputed_tokens for step in steps) == prompts


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize(("prompt", "copies"), [(6, 3), (8, 0)])
def test_samples_share_the_prompts_blocks_and_copy_only_a_partial_one(
    prompt: int, copies: int, async_steps: bool
) -> None:
    engine, executor = make_engine(64, async_steps=async_steps)
    row = sampled(0, list(range(1, prompt + 1)), 4, max_tokens=3, ignore_eos=True)
    found, steps = complete(engine, [row])
    check(found, [row], 1000)
    assert sum(step.prefill_tokens for step in steps) == prompt, "the prompt is computed once"
    assert sum(step.copied_blocks for step in steps) == copies
    assert steps[0].running == 4
    assert steps[0].blocks_live == 2, "all samples start in the blocks of the prompt"
    assert steps[0].shared_blocks == 3 * 2
    assert len(executor.batches[0].sampled_slots) == 4, "the first token of every sample comes from the prompt's step"
    assert steps[1].shared_blocks == 3 * (prompt // 4)


def test_the_samples_of_a_row_differ_and_the_first_is_that_of_a_row_with_one() -> None:
    rows = [sampled(3, [1, 2, 3, 4, 5], n, max_tokens=8, seed=5) for n in (1, 6)]
    one, six = (complete(make_engine(64)[0], [row])[0] for row in rows)
    outputs = [tuple(six[3, sample].token_ids.tolist()) for sample in range(6)]
    assert outputs[0] == tuple(one[3, 0].token_ids.tolist())
    assert len(set(outputs)) == 6


def test_a_row_with_more_samples_than_sequences_is_that_many_errors() -> None:
    engine, _ = make_engine(64, max_seqs=2)
    found, _ = complete(engine, [sampled(0, [1, 2], 3), sampled(1, [1, 2], 2, max_tokens=2)])
    assert [found[0, sample].error for sample in range(3)] == [
        "row 0: 3 samples, and at most max_seqs 2 run at a time"
    ] * 3
    assert found[1, 1].error is None


def test_samples_whose_logits_are_not_finite_fail_alone() -> None:
    row = sampled(0, [1, 2, 3, 4, 5, 6], 3, max_tokens=4, ignore_eos=True)
    bad = key_of(Request(0, row.token_ids, row.sampling, sample=1))
    engine, _ = make_engine(64, poison=frozenset({bad}))
    found, _ = complete(engine, [row])
    assert [found[0, sample].finish_reason for sample in range(3)] == ["length", "error", "length"]
    for sample in (0, 2):
        alone = Request(0, row.token_ids, row.sampling, sample=sample)
        assert found[0, sample].token_ids.tolist() == expected_output(alone, 1000, -1)


@pytest.mark.parametrize("async_steps", [False, True])
def test_samples_of_a_real_model_are_those_of_rows_that_share_nothing(tmp_path: Path, async_steps: bool) -> None:
    reference = save_tiny_model(tmp_path, "llama")
    prompts = [[(7 * row + place) % 250 for place in range(length)] for row, length in enumerate((5, 16, 40))]
    settings = {"max_tokens": 20, "ignore_eos": True}
    sharing = start_engine(tmp_path, async_steps=async_steps)
    alone = start_engine(tmp_path, prefix_cache=False)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, **settings)  # type: ignore[arg-type]
        rows = [Request(row, np.array(prompt, np.int32), sampling) for row, prompt in enumerate(prompts)]
        together = run(sharing.engine, [replace(row, samples=3) for row in rows])
        apart = run(alone.engine, [replace(row, sample=sample) for row in rows for sample in range(3)])
        assert [each.token_ids.tolist() for each in together] == [each.token_ids.tolist() for each in apart]
        if not temperature:
            for each in together:
                assert near_ties(reference, prompts[each.row_id], each.token_ids.tolist()) < 5
