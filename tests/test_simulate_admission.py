"""The simulation of admission, and what planned admission reaches in it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bound import read_model_cost
from benchmarks.simulate_admission import (
    LENGTHS,
    LIMITS,
    MODEL,
    ORACLE,
    Outcome,
    TimedExecutor,
    Traffic,
    main,
    simulate,
)
from engine.engine import Engine
from engine.request import Request, Sampling

COST = read_model_cost(MODEL)


def short_traffic(name: str) -> Traffic:
    """The named lengths with a quarter of the rows, and of all tokens."""
    traffic = LENGTHS[name](0.25)
    prompts, outputs = (np.maximum(1, lengths // 4) for lengths in (traffic.prompts, traffic.outputs))
    return Traffic(prompts, outputs, traffic.cap // 4, traffic.pool_tokens // 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "uniform", "bimodal", "equal"])
def test_planned_admission_comes_close_to_knowing_all_lengths(name: str) -> None:
    # A quarter of the rows makes the time in which nothing is known yet weigh four times as much.
    traffic = short_traffic(name)
    oracle, planned = (simulate(traffic, rule, COST) for rule in (ORACLE, "planned"))
    assert planned.recompute_share <= 0.03
    assert planned.live_share >= oracle.live_share - 0.06
    assert planned.output_tok_s >= 0.96 * oracle.output_tok_s


@pytest.mark.slow
def test_the_other_rules_waste_memory_or_work() -> None:
    traffic = short_traffic("lognormal")
    greedy, reserve, planned = (simulate(traffic, rule, COST) for rule in ("greedy", "reserve", "planned"))
    assert reserve.preemptions == 0
    assert reserve.live_share < planned.live_share / 2
    assert planned.output_tok_s > 0.99 * greedy.output_tok_s
    assert planned.output_tok_s > 1.2 * reserve.output_tok_s


def test_a_step_takes_its_products_reads_and_prefill_attention() -> None:
    executor = TimedExecutor(COST)
    engine = Engine(executor, replace(LIMITS, max_seqs=4), num_blocks=64, block_size=16)
    engine.add(Request(0, np.arange(100, dtype=np.int32), Sampling(max_tokens=2)))
    while engine.has_work:
        engine.step()
    prefill, decode = executor.step_seconds
    weights = COST.weight_bytes(1) / 4.3e12
    assert decode == pytest.approx(weights + 101 * COST.kv_bytes / 4.3e12)
    assert prefill == pytest.approx(weights + 5050 * COST.pair_flops / 655e12)


def test_the_engine_is_told_the_lengths_only_as_an_oracle() -> None:
    traffic = Traffic(np.full(40, 16), np.full(40, 50), 400, 2048)
    oracle, reserve = (simulate(traffic, rule, COST) for rule in (ORACLE, "reserve"))
    assert oracle.mean_running == pytest.approx(2048 / 66, rel=0.2)
    assert reserve.mean_running == pytest.approx(2048 / 416, rel=0.3)


def test_every_run_is_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--lengths", "equal", "--admission", "oracle", "planned", "--scale", "0.005"])
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [(line["lengths"], line["admission"], line["rows"]) for line in lines] == [
        ("equal", "oracle", 82),
        ("equal", "planned", 82),
    ]
    assert lines[0]["throughput_of_oracle"] == 1
    assert set(Outcome.__dataclass_fields__) <= lines[1].keys()
    assert captured.err.splitlines()[1].startswith("equal")
