"""The K/V storage: its size, and that no two places overlap."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache import KVCache, KVCacheShape

CPU = torch.device("cpu")


def shape_of(dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_the_bytes_that_its_tensors_take(dtype: torch.dtype) -> None:
    shape = shape_of(dtype)
    cache = KVCache(shape, 5, CPU)
    caches = [each for layer in range(3) for each in cache.layer(layer)]
    assert {each.shape for each in caches} == {(5, 4, 2, 8)}
    assert {each.dtype for each in caches} == {dtype}
    assert sum(each.nbytes for each in caches) == 5 * shape.block_bytes


def test_keys_and_values_of_every_layer_have_a_place_of_their_own_that_lasts() -> None:
    cache = KVCache(shape_of(torch.float32), 5, CPU)
    for layer in range(3):
        for kind, each in enumerate(cache.layer(layer)):
            each.fill_(10 * layer + kind)
    for layer in range(3):
        keys, values = cache.layer(layer)
        assert keys.unique().tolist() == [10 * layer]
        assert values.unique().tolist() == [10 * layer + 1]


def test_a_copied_block_holds_what_its_source_holds_in_every_layer_and_no_other_changes() -> None:
    cache = KVCache(shape_of(torch.float32), 50, CPU)
    for layer in range(3):
        for each in cache.layer(layer):
            each.copy_(torch.rand_like(each))
    before = [each.clone() for layer in range(3) for each in cache.layer(layer)]
    sources = torch.arange(0, 20)
    cache.copy_blocks(sources, 25 + sources)  # more than are copied at once
    for was, each in zip(before, (each for layer in range(3) for each in cache.layer(layer)), strict=True):
        assert torch.equal(each[25:45], was[:20])
        assert torch.equal(each[:25], was[:25])
        assert torch.equal(each[45:], was[45:])
