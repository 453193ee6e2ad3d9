"""Reading a shared prefix once for all decodes gives the tokens of reading it with each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import model_runner
from engine.model_runner import ModelRunner
from engine.request import Request, Sampling
from engine.startup import Started
from tests.oracle.greedy import near_ties, run, start_engine
from tests.tiny_models import save_tiny_model

LENGTH = 24


@pytest.fixture(autouse=True)
def always_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these would not gain."""
    monkeypatch.setattr(model_runner, "grouping_pays", lambda **_: True)


def rows(count: int, samples: int = 1, **sampling: object) -> list[Request]:
    """Prompts of three levels: one prefix of all, one of every branch, and a few tokens of each."""
    rng = np.random.default_rng(count)
    root = rng.integers(0, 256, 100).tolist()
    branches = [rng.integers(0, 256, 64 + 16 * int(rng.integers(0, 4))).tolist() for _ in range(max(1, count // 6))]
    prompts = []
    for row in range(count):
        own = rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
        prompts.append(own if row % 9 == 8 else root + branches[int(rng.integers(0, len(branches)))] + own)
    settings = Sampling(max_tokens=LENGTH, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return [
        Request(row, np.array(prompt, np.int32), settings, samples=samples)
        for row, prompt in enumerate(sorted(prompts))
    ]


def outputs(started: Started, requests: list[Request]) -> list[list[int]]:
    return [each.token_ids.tolist() for each in run(started.engine, requests)]


def grouped_steps(started: Started) -> int:
    """Captured steps with groups so far."""
    runner = started.engine._executor
    assert isinstance(runner, ModelRunner)
    return 0 if runner.graphs is None else sum(key.grouped for key in runner.graphs._graphs)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Started, Started]:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(path, request.param, head_dim=64)
    limits = {"device": "cuda", "kv_memory": 1 << 26, "max_seqs": 200, "max_batch_tokens": 600}
    on = start_engine(path, **limits, group_prefixes=True)
    return on, start_engine(path, **limits, group_prefixes=False, cuda_graphs=False, async_steps=False)


@pytest.mark.parametrize("count", [2, 15, 16, 17, 63, 130, 300])
def test_float32_tokens_are_those_of_prefixes_read_with_every_sequence(
    engines: tuple[Started, Started], count: int
) -> None:
    on, off = (outputs(started, rows(count)) for started in engines)
    assert sum(one != other for one, other in zip(on, off, strict=True)) <= count // 50
    assert grouped_steps(engines[0]) > 0


def test_samples_of_a_prompt_are_a_group(engines: tuple[Started, Started]) -> None:
    on, off = (outputs(started, rows(20, samples=4, temperature=0.8, seed=3)) for started in engines)
    assert len(on) == 80
    assert sum(one != other for one, other in zip(on, off, strict=True)) <= 1


@pytest.mark.parametrize("graphs", [True, False])
def test_grouped_steps_give_the_tokens_of_transformers(tmp_path: Path, graphs: bool) -> None:
    reference = save_tiny_model(tmp_path, "llama", head_dim=64)
    started = start_engine(tmp_path, device="cuda", max_seqs=64, cuda_graphs=graphs, group_prefixes=True)
    requests = rows(30)
    for request, output in zip(requests, outputs(started, requests), strict=True):
        assert near_ties(reference, request.token_ids.tolist(), output) < LENGTH // 4


def test_a_pool_that_preempts_groups_what_is_left(engines: tuple[Started, Started], tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=64)
    settings = {"device": "cuda", "max_seqs": 64, "max_batch_tokens": 200}
    wide = start_engine(tmp_path, kv_memory=1 << 26, group_prefixes=False, **settings)
    block = wide.memory_plan.pool // wide.memory_plan.num_blocks
    tight = start_engine(tmp_path, kv_memory=120 * block, group_prefixes=True, **settings)
    one, other = outputs(wide, rows(60)), outputs(tight, rows(60))
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 1
