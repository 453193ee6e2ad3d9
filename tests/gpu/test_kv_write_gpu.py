"""The compiled rotation and K/V write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.epilogue_triton import MANY_TOKENS
from kernels.kv_write import rotate_and_write_kv
from tests.kv_write_cases import BLOCK_SIZE, Case, check, make_inputs


# trap 21
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(14, 2, 64), (3, 3, 80), (6, 1, 96), (32, 8, 128), (16, 16, 256)]
)
def test_rows_match_the_reference_and_land_in_their_slots(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    check(Case(heads, kv_heads, head_dim, dtype, normed, tokens=100), rotate_and_write_kv, "cuda")


@pytest.mark.parametrize("tokens", [100, MANY_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "row_size"),
    [(14, 2, 64, 896), (3, 3, 80, 100), (32, 8, 128, 4096), (16, 16, 256, 5000), (64, 8, 128, 16384)],
)
@pytest.mark.parametrize(("normed", "bias"), [(False, True), (True, False)])
def test_the_epilogue_of_the_product_comes_first(
    heads: int, kv_heads: int, head_dim: int, row_size: int, normed: bool, bias: bool, dtype: torch.dtype, tokens: int
) -> None:
    case = Case(heads, kv_heads, head_dim, dtype, normed, tokens, row_size, bias)
    check(case, rotate_and_write_kv, "cuda")


# trap 19
def test_blocks_beyond_2_to_the_31_elements_are_written() -> None:
    near = make_inputs(Case(16, 8, 128, torch.bfloat16, tokens=100), "cuda")
    first = 2**31 // near.key_cache[0].numel()
    storage = torch.zeros(
        2, first + len(near.key_cache), *near.key_cache.shape[1:], dtype=torch.bfloat16, device="cuda"
    )
    slots = near.slot_mapping + first * BLOCK_SIZE
    far = replace(near, qkv=near.qkv.clone(), key_cache=storage[0], value_cache=storage[1], slot_mapping=slots)
    near.run(rotate_and_write_kv)
    far.run(rotate_and_write_kv)
    for cache, expected in zip(storage, (near.key_cache, near.value_cache), strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots], expected.flatten(0, 1)[near.slot_mapping])
        assert cache[:first].count_nonzero() == 0


# trap 22
def test_a_captured_write_follows_the_slots_of_each_replay() -> None:
    inputs = make_inputs(Case(16, 8, 128, torch.bfloat16, tokens=100), "cuda")
    slots = inputs.slot_mapping.clone()
    inputs.run(rotate_and_write_kv)
    values = inputs.heads()[2]
    inputs.value_cache.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.run(rotate_and_write_kv)
    inputs.slot_mapping[50:] = -1
    graph.replay()
    written = inputs.value_cache.flatten(0, 1)
    assert torch.equal(written[slots[:50]], values[:50])
    assert written[slots[50:]].count_nonzero() == 0
