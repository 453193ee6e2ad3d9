"""The size of the block pool on a CPU; tests/gpu has the measured one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kv_cache import KVCacheShape
from engine.memory_plan import CPU_POOL_BYTES, MemoryPlan, OutOfMemoryError, plan_memory, plan_steps
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from engine.request import Sampling
from engine.scheduler import Limits
from tests.tiny_models import tiny_config

SHAPE = KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)
BLOCK = 3 * 2 * 16 * 2 * 32 * 4


def tiny_decoder(folder: Path, *, tied: bool = False) -> Decoder:
    tiny_config("llama", tie_word_embeddings=tied).save_pretrained(folder)
    config = read_model_config(folder)
    return load_decoder(folder, config, dtype=torch.float32, device=torch.device("cpu"), dummy=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("tiny"))


def plan(decoder: Decoder, kv_memory: int | None) -> MemoryPlan:
    return plan_memory(decoder, SHAPE, Limits(4, 64, 512), Sampling(), kv_memory=kv_memory)


def test_left_to_itself_the_pool_takes_the_default_in_whole_blocks(decoder: Decoder) -> None:
    found = plan(decoder, None)
    assert found.num_blocks == CPU_POOL_BYTES // BLOCK
    assert CPU_POOL_BYTES - BLOCK < found.pool <= CPU_POOL_BYTES


@pytest.mark.parametrize(("kv_memory", "blocks"), [(BLOCK, 1), (10 * BLOCK - 1, 9), (10 * BLOCK, 10)])
def test_given_memory_is_rounded_down_to_whole_blocks(decoder: Decoder, kv_memory: int, blocks: int) -> None:
    found = plan(decoder, kv_memory)
    assert (found.num_blocks, found.pool) == (blocks, blocks * BLOCK)


def test_more_than_the_default_is_taken_as_given(decoder: Decoder) -> None:
    assert plan(decoder, 3 * CPU_POOL_BYTES).num_blocks == 3 * CPU_POOL_BYTES // BLOCK


def test_more_than_the_machine_has_is_refused(decoder: Decoder) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"would take {1 << 60} bytes, .* lower it"):
        plan(decoder, 1 << 60)


def test_less_than_a_block_is_refused_with_both_sizes_and_what_to_do(decoder: Decoder) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"{BLOCK - 1} bytes .* one block takes {BLOCK}: .*engine\.kv_memory"):
        plan(decoder, BLOCK - 1)


def test_weights_are_the_bytes_of_the_parameters_a_tied_head_counted_once(tmp_path: Path) -> None:
    apart, tied = (
        plan(tiny_decoder(tmp_path / name, tied=name == "tied"), BLOCK).weights for name in ("apart", "tied")
    )
    assert apart - tied == 320 * 64 * 4
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96 + 2 * 64
    assert tied == 4 * (320 * 64 + 3 * layer + 64)


def test_a_plan_reads_as_its_parts_that_are_known_in_gib() -> None:
    found = MemoryPlan(weights=3 << 30, activations=0, graphs=0, pool=1 << 29, reserve=0, others=0, num_blocks=7)
    assert str(found) == "weights 3.00 GiB, pool 0.50 GiB: 7 blocks"


def plan_of_a_gpu(room: int, bytes_a_token: int) -> Callable[[Limits], MemoryPlan]:
    """Plans of a device where a step takes memory by its tokens and the pool, of 100 bytes a block, gets the rest."""

    def planned(limits: Limits) -> MemoryPlan:
        activations = bytes_a_token * limits.max_batch_tokens
        if activations >= room:
            raise OutOfMemoryError("not even one block")
        blocks = (room - activations) // 100
        return MemoryPlan(0, activations, 0, 100 * blocks, 0, 0, blocks)

    return planned


@pytest.mark.parametrize(("bytes_a_token", "tokens"), [(1, 8192), (30, 8192), (31, 4096), (100, 2048), (130, 1024)])
def test_steps_that_leave_the_pool_too_little_are_halved(bytes_a_token: int, tokens: int) -> None:
    limits, found = plan_steps(
        plan_of_a_gpu(1_000_000, bytes_a_token), Limits(16, 8192, 4096), choose_tokens=True, choose_seqs=True
    )
    assert limits == Limits(16, tokens, 4096)
    assert found.activations == bytes_a_token * tokens


def test_given_steps_are_kept_and_no_more_sequences_run_than_there_are_blocks() -> None:
    plans = plan_of_a_gpu(900_000, 100)
    limits, found = plan_steps(plans, Limits(2000, 8192, 4096), choose_tokens=False, choose_seqs=True)
    assert (limits.max_batch_tokens, limits.max_seqs, found.num_blocks) == (8192, 808, 808)
    limits, _ = plan_steps(plans, Limits(2000, 8192, 4096), choose_tokens=False, choose_seqs=False)
    assert limits.max_seqs == 2000


def test_where_even_small_steps_do_not_fit_the_refusal_is_passed_on() -> None:
    with pytest.raises(OutOfMemoryError, match="not even one block"):
        plan_steps(plan_of_a_gpu(900, 1), Limits(16, 8192, 4096), choose_tokens=True, choose_seqs=True)
