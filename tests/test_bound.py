from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks.bound import BANDWIDTH, RATE, ModelCost, bound_seconds, read_model_cost
from benchmarks.workloads import WORKLOADS, Work

MODELS = Path(benchmarks.__file__).parent / "models"
POOL_BYTES = 139 * 2**30 * 0.92  # of weights and pool together, in the stored figures
DENSE = ModelCost(attention=100, expert=300, experts=1, active_experts=1, head=50, kv_bytes=8, pair_flops=16)


def pool_tokens(cost: ModelCost) -> float:
    weights = 2 * (cost.attention + cost.expert * cost.experts + cost.head)
    return (POOL_BYTES - weights) / cost.kv_bytes


@pytest.mark.parametrize(
    ("workload", "model", "seconds"),
    [
        ("nano", "qwen3-0.6b", 3.76),
        ("rag", "qwen3-0.6b", 24.53),
        ("onesys", "llama-3.1-8b", 56.01),
        ("chat", "llama-3.1-8b", 28.93),
        ("groups", "llama-3.1-8b", 15.36),
        ("chat", "qwen3-30b-a3b", 27.85),
        ("groups", "qwen3-30b-a3b", 9.17),
    ],
)
def test_the_bound_is_the_stored_figure(workload: str, model: str, seconds: float) -> None:
    cost = read_model_cost(MODELS / model)
    assert bound_seconds(WORKLOADS[workload](1.0), cost, pool_tokens(cost)) == pytest.approx(seconds, rel=0.002)


def test_a_small_pool_takes_longer() -> None:
    cost = read_model_cost(MODELS / "llama-3.1-8b")
    assert bound_seconds(WORKLOADS["chat"](1.0), cost, 65_536) == pytest.approx(32.85, rel=0.002)


def test_one_request_is_a_prefill_and_decodes_that_read_the_weights_and_its_keys() -> None:
    work = [Work(np.arange(20, dtype=np.int32), 3)]
    weights = 2 * 450 / BANDWIDTH
    prefill = max(weights, (2 * 400 * 20 + 2 * 50) / RATE) + 210 * 16 / RATE
    decodes = 2 * weights + (21 + 22) * 8 / BANDWIDTH
    assert bound_seconds(work, DENSE, 1e9) == pytest.approx(prefill + decodes)


def test_a_shared_prefix_is_computed_once() -> None:
    prompt = np.arange(160, dtype=np.int32)
    behind = [Work(np.append(prompt, own).astype(np.int32), 1) for own in range(8)]
    apart = [Work(np.roll(item.prompt, row).astype(np.int32), 1) for row, item in enumerate(behind)]
    assert bound_seconds(behind, DENSE, 1e9) < bound_seconds(apart, DENSE, 1e9)


def test_a_request_beyond_the_pool_runs_alone() -> None:
    work = [Work(np.full(30, first, np.int32), 2) for first in range(3)]
    alone = bound_seconds(work[:1], DENSE, 1e9)
    assert bound_seconds(work, DENSE, 1) == pytest.approx(3 * alone)


def test_few_tokens_touch_few_experts() -> None:
    cost = read_model_cost(MODELS / "qwen3-30b-a3b")
    assert cost.weight_bytes(1) == pytest.approx(2 * (cost.attention + 8 * cost.expert + cost.head))
    assert cost.weight_bytes(10_000) == pytest.approx(2 * (cost.attention + 128 * cost.expert + cost.head))


def test_a_config_without_head_dim_splits_the_hidden_size(tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_model_cost(tmp_path) == read_model_cost(MODELS / "llama-3.1-8b")


def test_experts_count_under_the_name_that_newer_versions_of_transformers_write(tmp_path: Path) -> None:
    config = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text(encoding="utf-8"))
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_model_cost(tmp_path) == read_model_cost(MODELS / "qwen3-30b-a3b")
