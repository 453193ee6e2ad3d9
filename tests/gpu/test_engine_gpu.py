"""The whole engine on a GPU: the CPU's tokens in IEEE float32, the same noise, and memory inside the plan."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.config import read_model_config
from engine.request import Sampling
from engine.startup import EngineSettings, resolve, start
from tests.oracle.greedy import complete, near_ties, start_engine
from tests.tiny_models import save_tiny_model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(9)
    prefix = rng.integers(0, 256, 90).tolist()
    return [prefix + rng.integers(0, 256, size).tolist() for size in range(1, 60, 3)]


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim"),
    [("llama", 6, 2, 64), ("mistral", 4, 4, 80), ("qwen2", 7, 1, 96), ("qwen3", 8, 1, 128), ("llama", 2, 1, 256)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_float32_gives_the_tokens_of_the_cpu(
    family: str, heads: int, kv_heads: int, head_dim: int, temperature: float, tmp_path: Path
) -> None:
    reference = save_tiny_model(
        tmp_path, family, hidden_size=96, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    sampling = {"max_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 4}
    tight = {"max_seqs": 6, "max_batch_tokens": 64, "kv_memory": 1 << 24}
    on_cpu = complete(start_engine(tmp_path, **tight), prompts(), **sampling)
    on_gpu = complete(start_engine(tmp_path, device="cuda", **tight), prompts(), **sampling)
    for ours, theirs, prompt in zip(on_gpu, on_cpu, prompts(), strict=True):
        if temperature == 0:
            near_ties(reference, prompt, ours.token_ids.tolist())
        else:
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_the_peak_stays_inside_the_memory_plan(tmp_path: Path) -> None:
    # traps 38, 39
    save_tiny_model(tmp_path, "llama", head_dim=64, hidden_size=512, vocab_size=50_000, max_position_embeddings=4096)
    config = read_model_config(tmp_path)
    settings = EngineSettings(kv_memory=1 << 28, max_seqs=200, max_batch_tokens=2048)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=50)
    gc.collect()
    before = torch.cuda.memory_allocated()
    started = start(tmp_path, config, settings, resolve(settings, config), sampling, end_token_ids=())
    plan = started.memory_plan
    rng = np.random.default_rng(1)
    work = [rng.integers(0, 256, size).tolist() for size in rng.integers(1, 300, 400)]
    complete(started, work, max_tokens=20, temperature=0.7, top_p=0.9, top_k=50)
    assert started.peak_bytes() - before <= plan.weights + plan.pool + plan.graphs + plan.activations * 1.02 + (1 << 20)


def test_the_pool_takes_what_is_free_less_the_reserve(tmp_path: Path) -> None:
    # trap 39
    save_tiny_model(tmp_path, "llama", head_dim=64)
    config = read_model_config(tmp_path)
    settings = EngineSettings()
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")  # somebody else's memory
    started = start(tmp_path, config, settings, resolve(settings, config), Sampling(), end_token_ids=())
    plan = started.memory_plan
    free, total = torch.cuda.mem_get_info()
    assert plan.pool > 0.9 * (total - held.numel() - (6 << 30))
    assert free >= plan.reserve * 0.9
