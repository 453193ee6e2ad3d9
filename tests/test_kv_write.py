"""Both forms of the K/V write against the plain one. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.kv_write import write_kv
from kernels.reference import reference_write_kv
from tests.kv_write_cases import BLOCK_SIZE, make_caches, make_rows, make_slots

Write = Callable[..., None]


@pytest.fixture
def triton_form() -> Write:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here: tests/gpu covers it")
    return pytest.importorskip("kernels.kv_write_triton").write_kv_triton


@pytest.fixture(params=["torch", "triton"])
def write(request: pytest.FixtureRequest) -> Write:
    return write_kv if request.param == "torch" else request.getfixturevalue("triton_form")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (2, 256)])
def test_rows_land_in_their_slots_and_nowhere_else(
    write: Write, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    key, value = make_rows(20, kv_heads, head_dim, dtype)
    slots = make_slots(20)
    caches, expected = make_caches(kv_heads, head_dim, dtype), make_caches(kv_heads, head_dim, dtype)
    write(key, value, *caches, slots)
    reference_write_kv(key, value, *expected, slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def test_a_negative_slot_writes_nowhere(write: Write) -> None:
    key, value = make_rows(4, 2, 64, torch.float32)
    slots = torch.tensor([-1, 5, -BLOCK_SIZE, 40])
    caches, untouched = make_caches(2, 64, torch.float32), make_caches(2, 64, torch.float32)
    write(key, value, *caches, slots)
    for cache, before, rows in zip(caches, untouched, (key, value), strict=True):
        changed = (cache != before).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
        assert changed.tolist() == [5, 40]
        assert torch.equal(cache.flatten(0, 1)[[5, 40]], rows[[1, 3]])


def test_caches_may_be_layers_of_a_larger_tensor(write: Write) -> None:
    storage = torch.zeros(8, 2, BLOCK_SIZE, 2, 64)
    key, value = make_rows(20, 2, 64, torch.float32)
    slots = make_slots(20)
    write(key, value, storage[:, 0], storage[:, 1], slots)
    assert torch.equal(storage[slots // BLOCK_SIZE, 0, slots % BLOCK_SIZE], key)
    assert torch.equal(storage[slots // BLOCK_SIZE, 1, slots % BLOCK_SIZE], value)


def test_no_tokens_write_nothing(write: Write) -> None:
    key, value = make_rows(0, 2, 64, torch.float32)
    caches = make_caches(2, 64, torch.float32)
    write(key, value, *caches, make_slots(0))
    assert torch.equal(caches[0], make_caches(2, 64, torch.float32)[0])


# trap 19: the memory is reserved, but only the block in use is touched.
def test_torch_form_reaches_blocks_beyond_2_to_the_31_elements() -> None:
    block_elements = BLOCK_SIZE * 2 * 64
    last = 2**31 // block_elements
    cache = torch.empty(last + 1, BLOCK_SIZE, 2, 64, dtype=torch.float16)
    key, _ = make_rows(1, 2, 64, torch.float16)
    write_kv(key, key, cache, cache, torch.tensor([last * BLOCK_SIZE + 3]))
    assert torch.equal(cache[last, 3], key[0])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_triton_form_refuses_layouts_it_cannot_read(triton_form: Write, wrong: int) -> None:
    key, value = make_rows(4, 2, 64, torch.float32)
    tensors: list[Tensor] = [key, value, *make_caches(2, 64, torch.float32)]
    tensors[wrong] = tensors[wrong].transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(ValueError, match="its last two dimensions must be contiguous"):
        triton_form(*tensors, make_slots(4))
