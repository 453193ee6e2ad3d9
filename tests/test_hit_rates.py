from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import hit_rates
from benchmarks.hit_rates import HitRates, measure, running_blocks, shared_blocks
from benchmarks.workloads import WORKLOADS, Work
from engine.admission import AdmissionRule
from engine.scheduler import Limits


def work(*prompts: list[int], new_tokens: int = 4) -> list[Work]:
    return [Work(np.array(prompt, np.int32), new_tokens) for prompt in prompts]


def test_blocks_are_shared_where_two_prompts_agree_up_to_their_end() -> None:
    prompts = work([1, 1, 2, 2, 3], [1, 1, 2, 2, 4], [1, 1, 2, 2, 5], [1, 1, 6, 6, 6], [7, 7, 7, 7, 7], [1, 1, 6, 6, 8])
    assert shared_blocks(prompts, 2) == 3  # 1 1, and behind it 2 2 and 6 6
    assert shared_blocks(prompts, 3) == 2  # 1 1 2 and 1 1 6
    assert shared_blocks(prompts[3:5], 2) == 0


def test_the_running_set_is_that_of_the_longest_sequence() -> None:
    assert running_blocks(work([1] * 5, [1] * 14, new_tokens=3), 6, 4) == 6 * 5


def rates(
    work: list[Work],
    *,
    order: str = "sorted",
    eviction: str = "planned",
    admission: AdmissionRule = "planned",
    seqs: int,
    blocks: int,
) -> HitRates:
    limits = Limits(seqs, 8192, 4096)
    return measure(work, limits, order=order, eviction=eviction, num_blocks=blocks, block_size=16, admission=admission)


@pytest.mark.parametrize("order", ["sorted", "shuffled", "question-major"])
def test_a_pool_with_room_for_all_finds_what_there_is(order: str) -> None:
    found = rates(WORKLOADS["rag"](0.01), order=order, seqs=8, blocks=2000)
    assert found.of_highest == 1
    assert found.hit_rate == found.highest_hit_rate > 0.8
    assert (found.evictions, found.preemptions, found.recompute_share) == (0, 0, 0)


def test_prefix_order_needs_no_room_for_what_is_shared_later() -> None:
    rag = WORKLOADS["rag"](0.02)
    found = rates(rag, seqs=4, blocks=running_blocks(rag, 4, 16))
    assert found.of_highest > 0.99
    assert found.evictions > 0


def test_half_the_room_finds_about_half_where_the_plan_is_known_and_nothing_where_it_is_not() -> None:
    rag = WORKLOADS["rag"](0.04)
    blocks = shared_blocks(rag, 16) // 2 + running_blocks(rag, 4, 16)
    found = {
        eviction: rates(rag, order="question-major", eviction=eviction, seqs=4, blocks=blocks)
        for eviction in ("planned", "lru")
    }
    assert found["planned"].of_highest > 0.48
    assert found["lru"].of_highest == 0


def test_preempted_sequences_compute_again() -> None:
    prompts = work(*([row] * 20 for row in range(1, 9)), new_tokens=80)
    found = rates(prompts, admission="greedy", seqs=8, blocks=24)
    assert found.preemptions > 0
    assert found.recompute_share > 0
    assert found.hit_rate == found.highest_hit_rate == 0
    assert found.of_highest == 1  # there was nothing to find
    assert rates(prompts, admission="reserve", seqs=8, blocks=24).preemptions == 0


def test_a_request_that_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the prompt has 20 tokens"):
        rates(work([1] * 20), seqs=1, blocks=1)


def test_every_combination_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    orders = ["--orders", "sorted", "question-major"]
    sizes = ["--block-sizes", "16", "64", "--pool-shares", "0", "1", "--max-seqs", "4"]
    hit_rates.main(["--workloads", "groups", "--scale", "0.03", *orders, *sizes, "--commit", "abc"])
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    fields = ("order", "eviction", "block_size", "pool_share")
    combinations = {tuple(line[field] for field in fields) for line in lines}
    assert len(combinations) == len(lines) == 16 == len(told.err.splitlines()) - 1
    for line in lines:
        assert line.keys() >= {"workload", "evictions", "recompute_share", "date", "commit", "versions"}
        assert 0 <= line["of_highest"] <= 1
        if line["order"] == "sorted" or line["pool_share"] == 1:
            assert line["of_highest"] > 0.995
