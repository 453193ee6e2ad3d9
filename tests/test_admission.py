"""When sequences start, under each rule, and that nothing but the order of work depends on it."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from engine.admission import AdmissionRule, make_admission
from engine.engine import Engine
from engine.occupancy_forecast import Newcomer
from engine.output_lengths import NO_GROUP
from engine.request import Completion, Request, Sampling
from engine.sequence import Sequence, SequenceTable
from engine.stats import StepStats
from tests.fake_executor import check_invariants, expected_output, make_engine, request

RULES: tuple[AdmissionRule, ...] = get_args(AdmissionRule)
SIZE = 4


def newcomer(prompt: int, needed: int, available: int, *, limit: int = 0, samples: int = 1) -> Newcomer:
    return Newcomer(prompt, prompt, limit or prompt + 1, 0, needed, available, samples, NO_GROUP)


def table_of(*rows: tuple[int, int]) -> SequenceTable:
    """Running sequences of so many prompt tokens and greatest lengths."""
    table = SequenceTable(8, SIZE)
    for row, (prompt, limit) in enumerate(rows):
        held = -(-prompt // SIZE)
        blocks = np.arange(held, dtype=np.int32) + 100 * row
        table.admit(Sequence(request(row, [1] * prompt)), blocks, 0, limit)
    return table


def run(engine: Engine, requests: list[Request]) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run to the end, every invariant checked after every step."""
    for each in requests:
        engine.add(each)
    found: dict[int, Completion] = {}
    steps: list[StepStats] = []
    idle = 0
    while engine.has_work:
        result = engine.step()
        check_invariants(engine)
        found |= {completion.row_id: completion for completion in result.completions}
        steps += [] if result.stats is None else [result.stats]
        idle = idle + 1 if result.stats is None and not result.completions else 0
        assert idle < 3, "nothing runs, and something waits"
    assert engine._pool.live == 0
    return found, steps


def check(found: dict[int, Completion], requests: list[Request], max_model_len: int) -> None:
    assert sorted(found) == sorted(each.row_id for each in requests)
    for each in requests:
        if not 0 < len(each.token_ids) < max_model_len:
            assert found[each.row_id].finish_reason == "error"
            continue
        tokens = expected_output(each, max_model_len)
        assert found[each.row_id].token_ids.tolist() == tokens
        by_stop = tokens[-1] == 0 or len(tokens) == each.stop_after
        assert found[each.row_id].finish_reason == ("stop" if by_stop else "length")


@pytest.mark.parametrize(("needed", "available", "allowed"), [(45, 50, True), (46, 50, False)])
def test_greedy_admission_keeps_a_watermark_beside_running_sequences(
    needed: int, available: int, allowed: bool
) -> None:
    admission = make_admission("greedy", table_of((8, 20)), 100)
    assert admission.admits(newcomer(4 * needed, needed, available)) is allowed


@pytest.mark.parametrize("rule", RULES)
def test_alone_a_sequence_may_take_the_whole_pool_and_no_more(rule: AdmissionRule) -> None:
    for needed, allowed in ((100, True), (101, False)):
        admission = make_admission(rule, table_of(), 100)
        admission.begin_step()
        assert admission.admits(newcomer(4 * needed, needed, 100)) is allowed


def test_reserving_admission_counts_greatest_lengths_and_every_sample() -> None:
    table = table_of((8, 41))  # 40 tokens with K/V: 10 blocks
    for num_blocks, samples, allowed in ((20, 1, True), (19, 1, False), (28, 2, True), (27, 2, False)):
        admission = make_admission("reserve", table, num_blocks)
        admission.begin_step()
        # 10 blocks at most, 2 of them full of the prompt
        assert admission.admits(newcomer(9, 3, 18, limit=41, samples=samples)) is allowed


def test_reserving_admission_counts_what_it_admitted_in_the_same_step() -> None:
    admission = make_admission("reserve", table_of((8, 41)), 25)
    admission.begin_step()
    assert admission.admits(newcomer(8, 2, 18, limit=41))
    assert not admission.admits(newcomer(8, 2, 16, limit=41))
    admission.begin_step()
    assert admission.admits(newcomer(8, 2, 18, limit=41))


def test_planned_admission_learns_from_rows_that_end_how_many_may_run() -> None:
    table = table_of(*[(8, 408)] * 4)
    admission = make_admission("planned", table, 400)

    def admitted() -> int:
        admission.begin_step()
        count = 0
        while count < 200 and admission.admits(newcomer(8, 2, 390 - 2 * count, limit=408)):
            count += 1
        return count

    before = admitted()
    table.num_tokens[table.running] += 20  # each made 20 tokens, and ends
    for _ in range(25):
        admission.record_ends(table.running, np.ones(4, np.bool_))
    table.num_tokens[table.running] -= 20  # and others like them run
    after = admitted()
    assert before < 30
    assert after > 45, "of seven blocks each, and not of a hundred"


prompts = st.lists(st.integers(1, 2), max_size=24)


@examples(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(
        st.tuples(prompts, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)), st.integers(0, 2)),
        min_size=1,
        max_size=16,
    ),
    num_blocks=st.integers(3, 24),
    max_seqs=st.integers(1, 6),
    spare_tokens=st.integers(0, 12),
    rule=st.sampled_from(RULES),
    async_steps=st.booleans(),
    prefix_cache=st.booleans(),
)
def test_random_schedules_in_a_tiny_pool_starve_nobody_and_change_no_token(
    rows: list[tuple[list[int], int, int | None, int]],
    num_blocks: int,
    max_seqs: int,
    spare_tokens: int,
    rule: AdmissionRule,
    async_steps: bool,
    prefix_cache: bool,
) -> None:
    # traps 12, 14, 15, 16
    engine, _ = make_engine(
        num_blocks,
        SIZE,
        max_seqs=max_seqs,
        max_batch_tokens=max_seqs + spare_tokens,
        async_steps=async_steps,
        prefix_cache=prefix_cache,
        admission=rule,
    )
    requests = [
        Request(row, np.array(tokens, np.int32), Sampling(max_tokens=most), group=group, stop_after=stop_after)
        for row, (tokens, most, stop_after, group) in enumerate(rows)
    ]
    found, steps = run(engine, requests)
    check(found, requests, engine.limits.max_model_len)
    if rule == "reserve":
        assert sum(step.preemptions for step in steps) == 0


@pytest.mark.parametrize("async_steps", [False, True])
def test_a_hidden_length_ends_a_row_like_an_end_token(async_steps: bool) -> None:
    # trap 14
    engine, _ = make_engine(64, async_steps=async_steps)
    rows = [
        Request(row, np.array([1 + row] * 6, np.int32), Sampling(max_tokens=40, ignore_eos=True), stop_after=row + 2)
        for row in range(3)
    ]
    found, steps = run(engine, rows)
    assert [len(found[row].token_ids) for row in range(3)] == [2, 3, 4]
    assert {each.finish_reason for each in found.values()} == {"stop"}
    assert sum(step.dropped_tokens for step in steps) == (3 if async_steps else 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_must_wait_for_room_leaves_what_is_cached_alone(rule: AdmissionRule) -> None:
    # traps 16 and 18
    engine, _ = make_engine(30, SIZE, max_seqs=4, max_batch_tokens=200, admission=rule)
    first = [request(0, list(range(1, 41)), max_tokens=1)]
    run(engine, first)  # leaves ten blocks of its prompt in the cache
    engine.add(request(1, [45] * 40, max_tokens=40, min_tokens=40))
    engine.step()
    engine.add(request(2, [46] * 100, max_tokens=4))  # 25 blocks: not while row 1 holds ten and more
    engine.add(request(3, list(range(1, 41)), max_tokens=1))
    cached = []
    while engine.num_running and engine.num_waiting == 2:
        result = engine.step()
        check_invariants(engine)
        assert result.stats is not None
        cached.append(result.stats.blocks_cached)
        assert result.stats.prefill_tokens == 0, "nothing of the long prompt is computed before all of it fits"
    assert len(cached) > 30
    assert cached[30] >= 10, "waiting evicts nothing"


def test_rows_that_give_way_do_not_give_way_for_ever() -> None:
    engine, _ = make_engine(12, SIZE, max_seqs=6, max_batch_tokens=40, admission="greedy")
    rows = [request(row, [1 + row] * 5, max_tokens=30, min_tokens=30) for row in range(8)]
    found, steps = run(engine, rows)
    check(found, rows, engine.limits.max_model_len)
    assert 0 < sum(step.preemptions for step in steps) < 3 * len(rows)
