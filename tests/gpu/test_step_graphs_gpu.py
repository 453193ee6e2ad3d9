"""Captured steps and steps launched ahead give the tokens of steps launched one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import step_graphs
from engine.model_runner import ModelRunner
from engine.startup import Started
from tests.oracle.greedy import complete, near_ties, start_engine
from tests.tiny_models import save_tiny_model

PLAIN = {"cuda_graphs": False, "async_steps": False}
AHEAD = {"cuda_graphs": True, "async_steps": True}
LENGTH = 40


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(path, request.param, head_dim=64)
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Started, Started]:
    """One that runs ahead from graphs, and one that launches step by step and kernel by kernel."""
    limits = {"device": "cuda", "kv_memory": 1 << 26, "max_seqs": 200, "max_batch_tokens": 600}
    return start_engine(folder, **limits, **AHEAD), start_engine(folder, **limits, **PLAIN)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    prefix = rng.integers(0, 256, 35).tolist()
    lengths = rng.integers(1, 30, count).tolist()
    return [prefix[: int(rng.integers(0, 35))] + rng.integers(0, 256, length).tolist() for length in lengths]


def outputs(started: Started, count: int, length: int = LENGTH, **sampling: object) -> list[list[int]]:
    completions = complete(started, prompts(count), max_tokens=length, ignore_eos=True, **sampling)
    return [completion.token_ids.tolist() for completion in completions]


# traps 22, 23; 16, 32, 64, 96, 128, 160, 192 and 200 are captured, and more than 200 do not run at once
@pytest.mark.parametrize(
    "count",
    [1, 2, *(size + off for size in (16, 32, 64, 96, 128, 160, 192, 200) for off in (-1, 0, 1)), 300],
)
def test_float32_tokens_are_those_of_plain_steps_around_every_captured_size(
    engines: tuple[Started, Started], count: int
) -> None:
    ahead, plain = (outputs(started, count) for started in engines)
    different = [row for row in range(count) if ahead[row] != plain[row]]
    assert len(different) <= count // 50, "only two logits within rounding of each other may part"


@pytest.fixture(scope="module")
def wide_engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Started, Started]:
    """As `engines`, for as many sequences as the largest captured step of decodes holds."""
    path = tmp_path_factory.mktemp("wide")
    save_tiny_model(path, "llama", head_dim=64)
    limits = {"device": "cuda", "kv_memory": 1 << 28, "max_seqs": 1024, "max_batch_tokens": 2048}
    return start_engine(path, **limits, **AHEAD), start_engine(path, **limits, **PLAIN)


# traps 22, 23
@pytest.mark.parametrize("count", [size + off for size in step_graphs.DECODE_SIZES if size > 200 for off in (-1, 0, 1)])
def test_float32_tokens_are_those_of_plain_steps_around_the_large_sizes(
    wide_engines: tuple[Started, Started], count: int
) -> None:
    ahead, plain = (outputs(started, count, length=8) for started in wide_engines)
    assert sum(one != other for one, other in zip(ahead, plain, strict=True)) <= count // 50


@pytest.mark.parametrize("count", [5, 70, 201])
def test_seeded_rows_reproduce_with_other_batches(engines: tuple[Started, Started], count: int) -> None:
    # traps 13, 17
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11}
    ahead, plain = (outputs(started, count, **sampling) for started in engines)
    assert sum(one != other for one, other in zip(ahead, plain, strict=True)) <= count // 50
    assert len({tuple(output) for output in ahead}) > count // 2


def test_graphs_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "llama", head_dim=64)
    started = start_engine(tmp_path, device="cuda", max_seqs=16, **AHEAD)
    for prompt, output in zip(prompts(21), outputs(started, 21), strict=True):
        assert near_ties(reference, prompt, output) < LENGTH // 4


def test_a_pool_that_preempts_gives_the_tokens_of_one_that_does_not(folder: Path) -> None:
    # traps 12, 14
    work = prompts(60)
    limits = {"device": "cuda", "max_seqs": 64, "max_batch_tokens": 200, **AHEAD}
    sampling = {"max_tokens": LENGTH, "ignore_eos": True}
    wide = complete(start_engine(folder, kv_memory=1 << 26, **limits), work, **sampling)
    tight = complete(start_engine(folder, kv_memory=150 * block_bytes(folder), **limits), work, **sampling)
    different = [
        one.row_id for one, other in zip(wide, tight, strict=True) if not np.array_equal(one.token_ids, other.token_ids)
    ]
    assert len(different) <= 1


@pytest.mark.parametrize(("factor", "largest"), [(0.0, 2048), (float("inf"), 3000)])
def test_large_steps_are_captured_only_where_launches_take_longer_than_computing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float, largest: int
) -> None:
    monkeypatch.setattr(step_graphs, "_LAUNCHES_HIDDEN", factor)
    limits = {"device": "cuda", "kv_memory": 1 << 26, "max_seqs": 200, "max_batch_tokens": 3000}
    ahead, plain = (start_engine(folder, **limits, **way) for way in (AHEAD, PLAIN))
    runner = ahead.engine._executor
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is not None
    assert runner.graphs.keys[0] == step_graphs.GraphKey(largest, mixed=True)
    assert outputs(ahead, 150) == outputs(plain, 150)


def block_bytes(folder: Path) -> int:
    started = start_engine(folder, device="cuda", kv_memory=1 << 24, **PLAIN)
    return started.memory_plan.pool // started.memory_plan.num_blocks
