"""The compiled K/V write."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import write_kv
from kernels.reference import reference_write_kv
from tests.kv_write_cases import BLOCK_SIZE, make_caches, make_rows, make_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (16, 256)])
def test_rows_land_in_their_slots_and_nowhere_else(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    key, value = make_rows(100, kv_heads, head_dim, dtype, "cuda")
    slots = make_slots(100, "cuda")
    slots[::7] = -1
    caches = make_caches(kv_heads, head_dim, dtype, "cuda")
    expected = make_caches(kv_heads, head_dim, dtype, "cuda")
    write_kv(key, value, *caches, slots)
    reference_write_kv(key, value, *expected, slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


# trap 19
def test_blocks_beyond_2_to_the_31_elements_are_written() -> None:
    kv_heads, head_dim = 8, 128
    first = 2**31 // (BLOCK_SIZE * kv_heads * head_dim)
    cache = torch.zeros(first + 8, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    key, value = make_rows(100, kv_heads, head_dim, torch.bfloat16, "cuda")
    slots = make_slots(100, "cuda") + first * BLOCK_SIZE
    other = torch.zeros_like(cache)
    write_kv(key, value, cache, other, slots)
    assert torch.equal(cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE], key)
    assert torch.equal(other[slots // BLOCK_SIZE, slots % BLOCK_SIZE], value)
    assert cache[:first].count_nonzero() == 0
    assert other[:first].count_nonzero() == 0
