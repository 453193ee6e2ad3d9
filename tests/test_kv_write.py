"""Both forms of the rotation and K/V write. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.kv_write import rotate_and_write_kv
from tests.interpreted import interpreted
from tests.kv_write_cases import BLOCK_SIZE, UNWRITTEN, Case, Inputs, check, make_inputs

Write = Callable[..., Tensor | None]
SHAPES = [(4, 1, 64), (3, 3, 80), (7, 1, 96), (16, 8, 128), (9, 9, 64), (2, 1, 256)]


@pytest.fixture
def triton_form() -> Write:
    return interpreted("kernels.kv_write_triton").rotate_and_write_kv_triton


@pytest.fixture(params=["torch", "triton"])
def write(request: pytest.FixtureRequest) -> Write:
    return rotate_and_write_kv if request.param == "torch" else request.getfixturevalue("triton_form")


# trap 21. The interpreter cuts bfloat16 off instead of rounding it: tests/gpu covers it.
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_rows_match_the_reference_and_land_in_their_slots(
    write: Write, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    check(Case(heads, kv_heads, head_dim, dtype, normed), write)


# 5000 elements are more than a program holds at a time.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("row_size", "bias", "normed"), [(96, False, True), (100, True, False), (5000, True, True), (0, True, True)]
)
def test_the_epilogue_of_the_product_comes_first(
    write: Write, row_size: int, bias: bool, normed: bool, dtype: torch.dtype
) -> None:
    check(Case(9, 3, 80, dtype, normed, row_size=row_size, bias=bias), write)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_the_wide_programs_of_many_tokens_compute_the_same(
    triton_form: Write, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int
) -> None:
    monkeypatch.setattr("kernels.kv_write_triton.MANY_TOKENS", 1)
    check(Case(heads, kv_heads, head_dim, normed=True, row_size=96, bias=True), triton_form)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 128])
def test_torch_form_takes_small_heads_and_bfloat16(head_dim: int, normed: bool) -> None:
    check(Case(6, 2, head_dim, torch.bfloat16, normed), rotate_and_write_kv)


def test_the_queries_are_returned_as_a_view() -> None:
    inputs = make_inputs(Case(6, 2, 64))
    query = rotate_and_write_kv(
        inputs.qkv, inputs.cos, inputs.sin, inputs.key_cache, inputs.value_cache, inputs.slot_mapping
    )
    assert query.shape == (9, 6, 64)
    assert torch.equal(query, inputs.heads()[0])
    assert query.data_ptr() == inputs.qkv.data_ptr()


# trap 22
def test_rows_that_are_all_padding_write_nothing(write: Write) -> None:
    inputs = make_inputs(Case(4, 2, 64))
    inputs.slot_mapping.copy_(-1 - BLOCK_SIZE * torch.arange(9))
    inputs.run(write)
    assert bool((inputs.key_cache == UNWRITTEN).all())
    assert bool((inputs.value_cache == UNWRITTEN).all())


def test_caches_may_be_layers_of_a_larger_tensor(write: Write) -> None:
    inputs = make_inputs(Case(4, 2, 64))
    storage = torch.stack((inputs.key_cache, inputs.value_cache), dim=1)
    within = replace(inputs, qkv=inputs.qkv.clone(), key_cache=storage[:, 0], value_cache=storage[:, 1])
    inputs.run(write)
    within.run(write)
    assert torch.equal(storage[:, 0], inputs.key_cache)
    assert torch.equal(storage[:, 1], inputs.value_cache)


def test_no_tokens_write_nothing(write: Write) -> None:
    inputs = make_inputs(Case(4, 2, 64, tokens=0))
    inputs.run(write)
    assert bool((inputs.key_cache == UNWRITTEN).all())


# trap 19: the memory is reserved, but only the block in use is touched.
def test_blocks_beyond_2_to_the_31_elements_are_written(write: Write) -> None:
    inputs = make_inputs(Case(4, 2, 64, torch.float16, tokens=1))
    last = 2**31 // inputs.key_cache[0].numel()
    cache = torch.empty(last + 1, *inputs.key_cache.shape[1:], dtype=torch.float16)
    _, _, value = inputs.heads()
    far = replace(inputs, key_cache=cache, value_cache=cache, slot_mapping=torch.tensor([last * BLOCK_SIZE + 3]))
    far.run(write)
    assert torch.equal(cache[last, 3], value[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, qkv=i.qkv.T.contiguous().T), "qkv has strides .*: its last dimension"),
        (lambda i: replace(i, sin=i.sin.T.contiguous().T), "sin has strides .*: it must be contiguous"),
        (lambda i: replace(i, key_cache=i.key_cache.mT.contiguous().mT), "key_cache .*: its last two dimensions"),
        (lambda i: replace(i, value_cache=i.value_cache[:, ::2]), "key_cache .*, value_cache .*: not equal"),
    ],
)
def test_triton_form_refuses_layouts_it_cannot_read(
    triton_form: Write, change: Callable[[Inputs], Inputs], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(make_inputs(Case(4, 2, 64))).run(triton_form)
