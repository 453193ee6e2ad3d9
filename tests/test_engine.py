"""The engine over a fake model that answers from what it reads: scheduling, sharing, preemption, accounting."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.prefix_index import BlockState
from engine.request import Completion, Request, Sampling
from engine.stats import StepStats
from runner.plan import highest_hit_tokens, order_rows
from tests.fake_executor import (
    VOCAB,
    FailedStepError,
    check_invariants,
    expected_output,
    key_of,
    make_engine,
    request,
)
from tests.oracle.greedy import run


@pytest.fixture(params=[False, True], ids=["one by one", "asynchronous"])
def async_steps(request: pytest.FixtureRequest) -> bool:
    """Whether a step is launched before the tokens of the one before it are read."""
    return bool(request.param)


def drain(engine: Engine) -> tuple[dict[int, Completion], list[StepStats]]:
    """Step to the end with every invariant checked after every step."""
    completions: dict[int, Completion] = {}
    steps: list[StepStats] = []
    while engine.has_work:
        try:
            result = engine.step()
        except FailedStepError:
            check_invariants(engine)
            continue
        check_invariants(engine)
        for completion in result.completions:
            assert completion.row_id not in completions, "a row came back twice"
            completions[completion.row_id] = completion
        if result.stats is None:
            assert result.completions or engine._launched, "a call that neither launched nor completed anything"
        else:
            steps.append(result.stats)
            stats = result.stats
            assert stats.blocks_live + stats.blocks_cached + stats.blocks_free == stats.blocks_total
            assert 0 <= stats.inflight_hit_tokens <= stats.cached_tokens
            assert 0 <= stats.recomputed_tokens <= stats.prefill_tokens
            assert stats.slack_tokens >= 0
    assert engine._pool.live == 0
    return completions, steps


def total(steps: list[StepStats], field: str) -> int:
    return sum(getattr(step, field) for step in steps)


def check_against_reference(
    engine: Engine, requests: list[Request], *, poison: frozenset[int] = frozenset(), vocab: int = VOCAB
) -> list[StepStats]:
    """Run `requests` and compare every completion with a run alone; rows of `poison` must fail."""
    for each in requests:
        engine.add(each)
    completions, steps = drain(engine)
    assert sorted(completions) == sorted(each.row_id for each in requests)
    limit = engine.limits.max_model_len
    ran = 0
    for each in requests:
        completion = completions[each.row_id]
        assert completion.prompt_tokens == len(each.token_ids)
        if not 0 < len(each.token_ids) < limit:
            assert completion.finish_reason == "error"
            continue
        ran += len(each.token_ids)
        if each.row_id in poison:
            assert completion.finish_reason == "error"
            continue
        expected = expected_output(each, limit, vocab=vocab)
        assert completion.token_ids.tolist() == expected
        assert completion.finish_reason == ("stop" if expected[-1] == 0 else "length")
    fresh = total(steps, "prefill_tokens") - total(steps, "recomputed_tokens")
    assert total(steps, "cached_tokens") + fresh == ran
    assert indexed_blocks(engine) <= prompt_blocks(engine, requests), "generated blocks are left in the index"
    return steps


def indexed_blocks(engine: Engine) -> set[int]:
    index = engine._index
    return {block for block in range(engine._pool.total) if index.state(block) is not BlockState.UNINDEXED}


def prompt_blocks(engine: Engine, requests: list[Request]) -> set[int]:
    """The indexed blocks that hold full blocks of some prompt."""
    size = engine._index.block_size
    return {block for each in requests for block in engine._index.match(each.token_ids, len(each.token_ids) // size)}


def long_output(prompt: list[int]) -> tuple[int, list[int]]:
    """A row id whose prompt is continued by 12 tokens, none of them twice, and those."""
    for row in range(1000):
        output = expected_output(request(row, prompt, max_tokens=12), 1000)
        if len(set(output)) == 12 and 0 not in output:
            return row, output
    raise AssertionError("no such row")


prompts = st.lists(st.integers(1, 2), max_size=24)  # two tokens: prompts share prefixes, extend and equal each other


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.tuples(prompts, st.integers(1, 14), st.integers(0, 3)), min_size=1, max_size=14),
    num_blocks=st.integers(3, 30),
    block_size=st.sampled_from([1, 2, 4]),
    max_seqs=st.integers(1, 6),
    spare_tokens=st.integers(0, 12),
    prefix_cache=st.booleans(),
    fail_steps=st.frozensets(st.integers(0, 30), max_size=2),
    poison=st.frozensets(st.integers(0, 13), max_size=2),
    async_steps=st.booleans(),
)
def test_random_schedules_keep_every_invariant_and_answer_as_if_alone(
    rows: list[tuple[list[int], int, int]],
    num_blocks: int,
    block_size: int,
    max_seqs: int,
    spare_tokens: int,
    prefix_cache: bool,
    fail_steps: frozenset[int],
    poison: frozenset[int],
    async_steps: bool,
) -> None:
    # traps 1, 4, 5, 7, 8, 9, 11, 12, 14, 15; invariants 1-4, 7 and 9
    requests = [
        request(row, tokens, max_tokens=count, min_tokens=min(least, count), seed=row % 3)
        for row, (tokens, count, least) in enumerate(rows)
    ]
    engine, _ = make_engine(
        num_blocks,
        block_size,
        max_seqs=max_seqs,
        max_batch_tokens=max_seqs + spare_tokens,
        prefix_cache=prefix_cache,
        fail_steps=fail_steps,
        poison=frozenset(key_of(each) for each in requests if each.row_id in poison),
        async_steps=async_steps,
    )
    check_against_reference(engine, requests, poison=poison)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=2, max_size=14),
    num_blocks=st.integers(4, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_seqs=st.integers(1, 6),
    fail_steps=st.frozensets(st.integers(0, 30), max_size=1),
    cancel_after=st.none() | st.integers(1, 12),
    async_steps=st.booleans(),
)
def test_rows_that_generate_each_others_prompts_share_what_is_equal_and_nothing_else(
    rows: list[tuple[list[int], int]],
    num_blocks: int,
    block_size: int,
    max_seqs: int,
    fail_steps: frozenset[int],
    cancel_after: int | None,
    async_steps: bool,
) -> None:
    # traps 1, 8, 9, 11, 12
    engine, _ = make_engine(
        num_blocks,
        block_size,
        max_seqs=max_seqs,
        max_batch_tokens=20,
        fail_steps=fail_steps,
        vocab=3,
        async_steps=async_steps,
    )
    requests = [
        Request(row, np.array(tokens, np.int32), Sampling(max_tokens=count), draw_id=0)
        for row, (tokens, count) in enumerate(rows)
    ]
    if cancel_after is not None:
        for each in requests:
            engine.add(each)
        for _ in range(cancel_after):
            with contextlib.suppress(FailedStepError):
                engine.step()
        engine.cancel()
        assert engine._pool.live == 0
        assert indexed_blocks(engine) <= prompt_blocks(engine, requests)
        check_invariants(engine)
        engine.step()  # brings what was refused
    check_against_reference(engine, requests, vocab=3)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=24), min_size=1, max_size=25),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 20),
    st.integers(1, 40),
    st.booleans(),
)
def test_sorted_prompts_hit_all_that_can_be_hit(
    prompts: list[list[int]],
    block_size: int,
    max_seqs: int,
    spare_tokens: int,
    async_steps: bool,
) -> None:
    arrays = [np.array(tokens, np.int32) for tokens in prompts]
    order = order_rows(arrays, "prefix")
    engine, _ = make_engine(
        2000, block_size, max_seqs=max_seqs, max_batch_tokens=max_seqs + spare_tokens, async_steps=async_steps
    )
    steps = check_against_reference(engine, [request(int(row), prompts[row], max_tokens=3) for row in order])
    assert total(steps, "cached_tokens") == highest_hit_tokens([arrays[row] for row in order], block_size)


def test_a_tiny_pool_preempts_and_recomputes_without_changing_a_token(async_steps: bool) -> None:
    # trap 12
    engine, _ = make_engine(8, 4, max_seqs=4, max_batch_tokens=64, async_steps=async_steps)
    requests = [request(row, [1 + row] * 6, max_tokens=14, min_tokens=14) for row in range(4)]
    steps = check_against_reference(engine, requests)
    assert total(steps, "preemptions") > 0
    assert total(steps, "recomputed_tokens") > 0


def test_a_preempted_row_finds_its_generated_blocks_again_and_leaves_none_indexed(async_steps: bool) -> None:
    engine, _ = make_engine(9, 2, max_seqs=2, max_batch_tokens=64, async_steps=async_steps)
    requests = [
        request(0, [1, 1, 1], max_tokens=14, min_tokens=14),
        request(1, [2, 2, 2], max_tokens=10, min_tokens=10),
    ]
    steps = check_against_reference(engine, requests)
    resumed = [step for step in steps if step.recomputed_tokens]
    assert total(steps, "preemptions") > 0
    assert sum(step.recomputed_tokens for step in resumed) < 3 + 10
    assert len(engine._index) == 2  # one full prompt block of each row, nothing generated


def test_a_cached_prompt_of_whole_blocks_still_computes_one_token(async_steps: bool) -> None:
    # trap 3
    engine, _ = make_engine(20, 4, async_steps=async_steps)
    steps = check_against_reference(engine, [request(0, [1] * 8, max_tokens=2)])
    steps = check_against_reference(engine, [request(1, [1] * 8, max_tokens=2)])
    assert total(steps, "cached_tokens") == 4
    assert total(steps, "prefill_tokens") == 4


def test_duplicates_in_one_step_compute_their_shared_blocks_once(async_steps: bool) -> None:
    # traps 8, 11
    engine, _ = make_engine(40, 4, max_batch_tokens=100, async_steps=async_steps)
    steps = check_against_reference(engine, [request(row, [1] * 10, max_tokens=3) for row in range(4)])
    assert steps[0].running == 4
    assert steps[0].prefill_tokens == 10 + 3 * 2
    assert steps[0].inflight_hit_tokens == steps[0].cached_tokens == 3 * 8


def test_followers_wait_for_blocks_that_a_later_chunk_fills(async_steps: bool) -> None:
    engine, _ = make_engine(40, 4, max_batch_tokens=10, max_seqs=4, async_steps=async_steps)
    steps = check_against_reference(engine, [request(row, [1] * 21, max_tokens=2) for row in range(3)])
    assert total(steps, "prefill_tokens") == 21 + 2 * 1  # the shared 20 tokens are computed once
    assert steps[0].running == 1
    assert steps[0].waiting == 2


def test_if_the_first_of_two_sharers_fails_nothing_unwritten_stays_indexed(async_steps: bool) -> None:
    # trap 8
    engine, _ = make_engine(40, 4, max_batch_tokens=100, fail_steps=frozenset({0}), async_steps=async_steps)
    for row in range(2):
        engine.add(request(row, [1] * 10, max_tokens=3))
    with pytest.raises(FailedStepError):
        engine.step()
    assert len(engine._index) == 0
    assert engine._pool.live == 0
    completions, _ = drain(engine)
    assert [completions[row].token_ids.tolist() for row in range(2)] == [
        expected_output(request(row, [1] * 10, max_tokens=3), 1000) for row in range(2)
    ]


def test_a_request_that_can_never_fit_is_an_error_within_one_step(async_steps: bool) -> None:
    # trap 15, 40, 41
    engine, _ = make_engine(4, 4, max_seqs=2, async_steps=async_steps)
    limit = engine.limits.max_model_len
    assert limit == 16
    for row, length in enumerate([limit + 1, limit, limit - 1, 3, 0]):
        engine.add(request(row, [1] * length, max_tokens=4))
    first = {completion.row_id: completion for completion in engine.step().completions}
    assert {row: each.finish_reason for row, each in first.items() if each.error} == {
        0: "error",
        1: "error",
        4: "error",
    }
    assert "row 0" in str(first[0].error)
    assert "17 tokens" in str(first[0].error)
    assert "at most 15" in str(first[0].error)
    rest, _ = drain(engine)
    done = first | rest
    assert len(done[2].token_ids) == 1
    assert done[2].finish_reason in ("length", "stop")
    assert done[3].error is None


def test_rows_with_logits_that_are_not_finite_fail_alone(async_steps: bool) -> None:
    # trap 37
    requests = [request(row, [1 + row] * 5, max_tokens=4) for row in range(3)]
    engine, _ = make_engine(40, 4, poison=frozenset({key_of(requests[1])}), async_steps=async_steps)
    for each in requests:
        engine.add(each)
    completions, _ = drain(engine)
    assert completions[1].finish_reason == "error"
    assert "row 1" in str(completions[1].error)
    for row in (0, 2):
        assert completions[row].token_ids.tolist() == expected_output(requests[row], 1000)


def test_a_row_that_runs_again_has_not_computed_its_dropped_token_before() -> None:
    requests = [request(row, [1] * 9, max_tokens=4, min_tokens=4) for row in range(2)]
    poison = frozenset({key_of(requests[1])})
    engine, _ = make_engine(40, 4, poison=poison, async_steps=True)
    steps = check_against_reference(engine, requests, poison=frozenset({1}))
    assert total(steps, "recomputed_tokens") == 9
    assert total(steps, "dropped_tokens") == 2
    assert total(steps, "decode_tokens") == 3 + 2


def test_a_long_prompt_is_chunked_while_others_decode(async_steps: bool) -> None:
    # trap 5
    engine, executor = make_engine(60, 4, max_seqs=3, max_batch_tokens=8, async_steps=async_steps)
    check_against_reference(
        engine, [request(0, [1] * 5, max_tokens=20, min_tokens=20), request(1, [2] * 40, max_tokens=3)]
    )
    mixed = [batch for batch in executor.batches if batch.num_decodes and len(batch.token_ids) > batch.num_decodes]
    assert len(mixed) >= 5
    assert all(len(batch.token_ids) <= 8 for batch in executor.batches)


def test_cancelling_frees_every_block_and_returns_what_was_dropped(async_steps: bool) -> None:
    engine, _ = make_engine(40, 4, max_seqs=2, async_steps=async_steps)
    for row in range(4):
        engine.add(request(row, [1, 2, 3, 4, 5], max_tokens=9, min_tokens=9))
    for _ in range(7):
        engine.step()
    assert [each.row_id for each in engine.cancel()] == [0, 1, 2, 3]
    assert len(engine._index) == 1  # of the prompts, nothing generated
    assert not engine.has_work
    assert engine._pool.live == 0
    check_invariants(engine)


def test_without_a_prefix_cache_nothing_is_shared_or_kept(async_steps: bool) -> None:
    engine, _ = make_engine(40, 4, prefix_cache=False, async_steps=async_steps)
    steps = check_against_reference(engine, [request(row, [1] * 9, max_tokens=3) for row in range(3)])
    assert total(steps, "cached_tokens") == 0
    assert total(steps, "prefill_tokens") == 27
    assert engine._pool.free == 40


def test_a_stop_id_ends_a_row_and_is_part_of_its_tokens(async_steps: bool) -> None:
    engine, _ = make_engine(40, 4, async_steps=async_steps)
    row, free = long_output([5, 6, 7])
    stop = free[2]
    engine.add(Request(row, np.array([5, 6, 7], np.int32), Sampling(max_tokens=12, stop_token_ids=(stop,))))
    completions, _ = drain(engine)
    assert completions[row].token_ids.tolist() == free[: free.index(stop) + 1]
    assert completions[row].finish_reason == "stop"


def test_ignoring_the_end_token_runs_to_the_length(async_steps: bool) -> None:
    # trap 29
    engine, _ = make_engine(80, 4, async_steps=async_steps)
    engine.add(Request(0, np.array([5, 6, 7], np.int32), Sampling(max_tokens=60, ignore_eos=True)))
    completions, _ = drain(engine)
    assert completions[0].token_ids.tolist() == expected_output(request(0, [5, 6, 7], max_tokens=60), 1000, end=-1)
    assert completions[0].finish_reason == "length"


def test_stop_strings_cut_where_they_begin_and_need_a_decoder(async_steps: bool) -> None:
    engine, executor = make_engine(40, 4, async_steps=async_steps)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.add(Request(0, np.array([5], np.int32), Sampling(stop=("x",))))
    row, output = long_output([5, 6, 7])
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    engine = Engine(
        executor,
        engine.limits,
        num_blocks=40,
        block_size=4,
        end_token_ids=(0,),
        decode=lambda ids: "".join(letters[each] for each in ids),
    )
    stop = "".join(letters[each] for each in output[1:3])
    [completion] = run(engine, [Request(row, np.array([5, 6, 7], np.int32), Sampling(max_tokens=12, stop=(stop,)))])
    assert completion.token_ids.tolist() == output[:3]
    assert completion.finish_reason == "stop"
    assert completion.stop_at == 1


def test_a_row_that_ends_while_the_next_step_runs_drops_its_token_and_keeps_its_blocks_until_then() -> None:
    # trap 14
    row, output = long_output([5, 6, 7])
    engine, executor = make_engine(40, 4, max_seqs=2, async_steps=True)
    stop = Sampling(max_tokens=12, stop_token_ids=(output[2],))
    engine.add(Request(row, np.array([5, 6, 7], np.int32), stop))
    engine.add(request(row + 1, [9, 9], max_tokens=20, min_tokens=20))
    completions: list[Completion] = []
    while not completions:
        completions = engine.step().completions
    assert completions[0].token_ids.tolist() == output[: output.index(output[2]) + 1]
    [launched] = engine._launched
    [slot] = [slot for slot in launched.schedule.slots.tolist() if engine._table.ended[slot]]
    held = engine._table.held_blocks(slot).tolist()
    assert all(engine._pool.references(block) == 1 for block in held), "a launched step still writes into them"
    stats = engine.step().stats
    assert stats is not None
    assert stats.dropped_tokens == 1
    assert all(engine._pool.references(block) == 0 for block in held)
    completion, steps = drain(engine)
    assert len(completion[row + 1].token_ids) == 20
    assert total(steps, "dropped_tokens") == 0, "an end by length is known in advance"
    assert len(executor.batches) == 20


def test_a_preemption_waits_for_the_tokens_that_are_still_on_the_device() -> None:
    engine, executor = make_engine(8, 4, max_seqs=4, max_batch_tokens=64, async_steps=True)
    for row in range(4):
        engine.add(request(row, [1 + row] * 6, max_tokens=14, min_tokens=14))
    preempted = 0
    while engine.has_work:
        unread, launched = len(engine._launched), len(executor.batches)
        waiting = engine.num_waiting
        engine.step()
        if engine.num_waiting > waiting:
            preempted += 1
            assert unread == 0, "a sequence was preempted before its token was read"
            assert len(executor.batches) == launched + 1
    assert preempted > 0


def test_cancelling_with_a_step_on_the_device_returns_the_rows_that_were_not_completed() -> None:
    engine, _ = make_engine(40, 4, max_seqs=2, async_steps=True)
    row, output = long_output([5, 6, 7])
    engine.add(Request(row, np.array([5, 6, 7], np.int32), Sampling(max_tokens=12, stop_token_ids=(output[2],))))
    engine.add(request(row + 1, [9, 9], max_tokens=20, min_tokens=20))
    engine.add(request(row + 2, [8, 8], max_tokens=20, min_tokens=20))
    while not engine.step().completions:
        pass
    assert [each.row_id for each in engine.cancel()] == [row + 1, row + 2]
    assert not engine.has_work
    assert engine._pool.live == 0
    check_invariants(engine)
