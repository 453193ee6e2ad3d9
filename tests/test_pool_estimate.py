from pathlib import Path

import torch

from engine.kv_cache import KVCacheShape
from engine.models.config import ModelConfig, read_model_config
from engine.models.loader import load_decoder
from engine.pool_estimate import PoolEstimate, estimate_pool
from engine.startup import EngineSettings, resolve
from tests.tiny_models import save_tiny_model


def estimate(config: ModelConfig, **settings: object) -> PoolEstimate:
    given = EngineSettings(device="cpu", **settings)
    return estimate_pool(config, given, resolve(given, config))


def saved(folder: Path, family: str) -> ModelConfig:
    save_tiny_model(folder, family)
    return read_model_config(folder)


def test_the_weights_are_those_of_the_loaded_decoder(tmp_path: Path):
    for family in ("llama", "qwen3_moe"):
        config = saved(tmp_path / family, family)
        decoder = load_decoder(tmp_path / family, config, dtype=torch.float32, device=torch.device("cpu"))
        expected = sum(parameter.nbytes for parameter in decoder.parameters())
        assert estimate(config).weights == expected


def test_the_pool_is_what_was_asked_for_in_whole_blocks(tmp_path: Path):
    config = saved(tmp_path, "llama")
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 32, torch.float32)
    pool = estimate(config, block_size=32, kv_memory=10 * shape.block_bytes + 1)
    assert (pool.num_blocks, pool.fits, pool.is_bound) == (10, True, False)
    assert estimate(config).pool == 1 << 30


def test_what_this_machine_does_not_hold_is_told_apart(tmp_path: Path):
    config = saved(tmp_path, "llama")
    assert not estimate(config, kv_memory=1 << 50).fits
    assert not estimate(config, kv_memory=1).fits
