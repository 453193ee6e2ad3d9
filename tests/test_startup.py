"""From a model folder to a running engine: what is chosen, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config import ModelConfig, read_model_config
from engine.request import Sampling
from engine.scheduler import Limits
from engine.startup import EngineSettingError, EngineSettings, Resolved, Started, resolve, start
from tests.fake_executor import request
from tests.oracle.greedy import run
from tests.tiny_models import tiny_config

BLOCK = 3 * 2 * 16 * 2 * 64 * 4  # bytes of a block of the tiny model in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weight files; head_dim is one that every device supports."""
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama", head_dim=64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return read_model_config(folder)


def resolved(config: ModelConfig, **settings: Any) -> Resolved:
    return resolve(EngineSettings(**{"device": "cpu", **settings}), config)


def started(
    folder: Path, *, end_token_ids: tuple[int, ...] = (), vocab_limit: int | None = None, **settings: Any
) -> Started:
    values: dict[str, Any] = {"device": "cpu", "dummy_weights": True, "kv_memory": 20 * BLOCK}
    chosen = EngineSettings(**values | settings)
    config = read_model_config(folder)
    return start(
        folder,
        config,
        chosen,
        resolve(chosen, config),
        Sampling(),
        end_token_ids=end_token_ids,
        vocab_limit=vocab_limit,
    )


def outputs(engine: Started, **sampling: Any) -> list[list[int]]:
    rows = [request(row, [3 + row] * 20, **sampling) for row in range(3)]
    return [each.token_ids.tolist() for each in run(engine.engine, rows)]


def test_graphs_on_a_cpu_are_refused_and_asynchronous_steps_are_not(config: ModelConfig) -> None:
    with pytest.raises(EngineSettingError, match="auto or false without a CUDA device"):
        resolved(config, cuda_graphs=True)
    assert resolved(config, cuda_graphs=False, async_steps=True).async_steps


def test_on_a_cpu_float32_and_the_models_own_length_are_chosen(config: ModelConfig) -> None:
    assert resolved(config) == Resolved(
        torch.device("cpu"),
        torch.float32,
        Limits(64, 1024, 512),
        cuda_graphs=False,
        async_steps=False,
        group_prefixes=False,
    )


def test_the_device_is_a_gpu_where_there_is_one(config: ModelConfig) -> None:
    assert resolved(config, device="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_taken(config: ModelConfig, name: str) -> None:
    assert resolved(config, dtype=name).dtype == getattr(torch, name)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"max_seqs": 8}, (8, 1024)),
        ({"max_seqs": 2000}, (2000, 2000)),
        ({"max_batch_tokens": 10}, (10, 10)),
        ({"max_batch_tokens": 5000}, (64, 5000)),
        ({"max_seqs": 9, "max_batch_tokens": 9}, (9, 9)),
    ],
)
def test_the_limit_that_is_left_open_yields_to_the_given_one(
    config: ModelConfig, given: dict[str, int], chosen: tuple[int, int]
) -> None:
    limits = resolved(config, **given).limits
    assert (limits.max_seqs, limits.max_batch_tokens) == chosen


@pytest.mark.parametrize("length", [2, 512])
def test_a_length_up_to_the_models_own_is_taken(config: ModelConfig, length: int) -> None:
    assert resolved(config, max_model_len=length).limits.max_model_len == length


@pytest.mark.parametrize(
    ("settings", "key", "value", "accepted"),
    [
        ({"max_seqs": 9, "max_batch_tokens": 8}, "engine.max_seqs", 9, "at most engine.max_batch_tokens=8"),
        ({"max_model_len": 513}, "engine.max_model_len", 513, "at most 512, the model's own limit"),
        ({"device": "cuda:99"}, "engine.device", "cuda:99", "auto, cpu, "),
    ],
)
def test_what_cannot_be_met_is_refused_with_key_value_and_what_is_accepted(
    config: ModelConfig, settings: dict[str, Any], key: str, value: object, accepted: str
) -> None:
    # trap 27
    with pytest.raises(EngineSettingError) as caught:
        resolved(config, **settings)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.accepted.startswith(accepted)
    assert str(caught.value) == f"{key}: {value!r}; accepted: {caught.value.accepted}"


def test_heads_that_the_kernels_are_not_made_for_are_refused_as_the_model(tmp_path: Path) -> None:
    # trap 21
    tiny_config("qwen3", head_dim=48).save_pretrained(tmp_path)
    with pytest.raises(EngineSettingError, match=r"a qwen3 model.*head_dim 48 on cpu: supported are 8, 16") as caught:
        resolved(read_model_config(tmp_path))
    assert caught.value.key == "model.path"


def test_a_length_beyond_the_pool_is_refused_with_what_the_pool_holds(folder: Path) -> None:
    assert started(folder, max_model_len=320).engine.limits.max_model_len == 320
    with pytest.raises(EngineSettingError, match="at most 320, the tokens that the K/V pool of 20 blocks") as caught:
        started(folder, max_model_len=321)
    assert (caught.value.key, caught.value.value) == ("engine.max_model_len", 321)


def test_a_length_and_a_number_of_sequences_left_open_are_lowered_to_what_the_pool_holds(folder: Path) -> None:
    engine = started(folder)
    assert engine.memory_plan.num_blocks == 20
    assert engine.engine.limits == Limits(20, 1024, 320)
    assert (engine.device_name, engine.peak_bytes()) == ("cpu", 0)


def test_end_tokens_and_the_vocabulary_limit_reach_the_engine(folder: Path) -> None:
    # traps 26, 29
    free = outputs(started(folder), max_tokens=12)
    assert [len(each) for each in free] == [12] * 3
    end = free[0][5]
    ended = outputs(started(folder, end_token_ids=(end,)), max_tokens=12)
    assert ended == [each[: each.index(end) + 1] if end in each else each for each in free]
    assert max(map(max, outputs(started(folder), max_tokens=12, temperature=100.0))) >= 40
    assert max(map(max, outputs(started(folder, vocab_limit=40), max_tokens=12, temperature=100.0))) < 40


@pytest.mark.parametrize(("prefix_cache", "hits"), [(True, 16), (False, 0)])
def test_the_prefix_cache_is_on_or_off_as_set(folder: Path, prefix_cache: bool, hits: int) -> None:
    engine = started(folder, prefix_cache=prefix_cache)
    outputs(engine, max_tokens=2)
    assert [each.cached_tokens for each in run(engine.engine, [request(0, [3] * 20, max_tokens=2)])] == [hits]
