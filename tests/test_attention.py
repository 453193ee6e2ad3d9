"""Both forms of paged attention against the float32 reference. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from kernels import attention_torch
from kernels.attention import check_supported, paged_attention
from kernels.attention_torch import paged_attention_torch
from kernels.reference import reference_attention
from tests.attention_cases import (
    BLOCK_SIZES,
    GROUPS,
    HEAD_DIMS,
    TOLERANCE,
    Case,
    case_error,
    make_batch,
    make_inputs,
)
from tests.errors import relative_error
from tests.interpreted import interpreted

# Spare rows of a tile see no key; their 0 / 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

MIXED = Case(((1, 33), (1, 5), (1, 16), (7, 30), (21, 21), (40, 100)))
"""Decodes, the later chunk of a longer prompt, and whole prompts, in one step."""

Attention = Callable[..., Tensor]


@pytest.fixture
def triton_form() -> Attention:
    return interpreted("kernels.attention_triton").paged_attention_triton


@pytest.fixture(params=["torch", "triton"])
def attention(request: pytest.FixtureRequest) -> Attention:
    return paged_attention_torch if request.param == "torch" else request.getfixturevalue("triton_form")


# trap 21
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_group_matches_the_reference(attention: Attention, head_dim: int, group: int) -> None:
    case = Case(((1, 19), (3, 40)), head_dim=head_dim, group=group, kv_heads=1)
    assert case_error(case, attention) < TOLERANCE[case.dtype]


# trap 21
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_matches_the_reference(attention: Attention, block_size: int, window: int | None) -> None:
    lengths = ((1, block_size), (1, block_size + 1), (1, 300), (5, 2 * block_size + 1))
    case = Case(lengths, block_size=block_size, window=window, kv_heads=1)
    assert case_error(case, attention) < TOLERANCE[case.dtype]


# The interpreter multiplies bfloat16 as if it were integers, so there float16 stands for it; a GPU test has both.
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixed_step_matches_the_reference(attention: Attention, dtype: torch.dtype, window: int | None) -> None:
    assert case_error(replace(MIXED, dtype=dtype, window=window), attention) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 33])
def test_a_long_prompt_spans_several_tiles(attention: Attention, window: int | None) -> None:
    case = Case(((1, 200), (150, 150), (260, 300)), group=1, kv_heads=1, window=window)
    assert case_error(case, attention) < TOLERANCE[case.dtype]


def test_torch_form_computes_bfloat16() -> None:
    assert case_error(replace(MIXED, dtype=torch.bfloat16), paged_attention_torch) < TOLERANCE[torch.bfloat16]


# trap 20
@pytest.mark.parametrize("window", [None, 20])
def test_unused_slots_and_table_entries_reach_no_output(attention: Attention, window: int | None) -> None:
    case = replace(MIXED, window=window)
    clean = make_inputs(case, poison=(0.0, 0.0), unused_id=0).run(attention)
    nan, inf = float("nan"), float("inf")
    for poison in [(nan, nan), (inf, -inf), (1e30, 1e30)]:
        dirty = make_inputs(case, poison=poison, unused_id=-1).run(attention)
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


def test_decodes_that_share_prefixes_match_the_reference(attention: Attention) -> None:
    lengths = ((1, 70), (1, 100), (1, 90), (7, 30), (1, 20))
    case = Case(lengths, segments=((0, 3, 0, 32), (1, 2, 32, 64)), padding=1)
    assert case_error(case, attention) < TOLERANCE[case.dtype]


# trap 5
def test_a_later_chunk_attends_to_what_earlier_chunks_wrote(attention: Attention) -> None:
    whole = make_inputs(Case(((90, 90),)))
    expected = whole.run(attention)
    key_cache = torch.full_like(whole.key_cache, float("nan"))
    value_cache = torch.full_like(whole.value_cache, float("nan"))
    table = whole.tables
    for start, end in [(0, 16), (16, 47), (47, 48), (48, 90)]:
        position = torch.arange(start, end)
        block, offset = table[0, position // 16].long(), position % 16
        key_cache[block, offset] = whole.key_cache[block, offset]
        value_cache[block, offset] = whole.value_cache[block, offset]
        chunk = replace(
            whole,
            query=whole.query[start:end],
            key_cache=key_cache,
            value_cache=value_cache,
            batch=make_batch(table, [end - start], [end]),
        )
        assert relative_error(chunk.run(attention), expected[start:end]) < TOLERANCE[torch.float32]


# trap 24
@pytest.mark.parametrize("window", [1, 2, 16, 17, 63, 64, 200])
def test_a_sliding_window_sees_the_keys_that_transformers_sees(attention: Attention, window: int) -> None:
    length = 70
    inputs = make_inputs(Case(((1, length), (length, length)), head_dim=128, group=1, kv_heads=1, window=window))
    # Equal scores and values that are one-hot in the position: the output shows which keys were seen.
    inputs.query.zero_()
    position = torch.arange(length)
    for table in inputs.tables.long():
        inputs.value_cache[table[position // 16], position % 16, 0] = torch.eye(length, 128)
    visible = inputs.run(attention)[:, 0, :length] > 0
    sees = sliding_window_causal_mask_function(window)
    expected = sees(0, 0, position[:, None], position[None, :])
    assert torch.equal(visible[1:], expected)
    assert torch.equal(visible[0], expected[-1])


# trap 22
@pytest.mark.parametrize("lengths", [MIXED.lengths, ((1, 33), (1, 5)), ((7, 30),)])
def test_padding_sequences_and_tokens_change_no_output(
    attention: Attention, lengths: tuple[tuple[int, int], ...]
) -> None:
    plain = make_inputs(Case(lengths)).run(attention)
    padded = make_inputs(Case(lengths, padding=3))
    assert relative_error(padded.run(attention), plain) < 1e-6


def test_decodes_and_chunks_may_come_in_any_order(attention: Attention) -> None:
    case = Case(((7, 30), (1, 33), (21, 21), (1, 5)))
    assert case_error(case, attention) < TOLERANCE[case.dtype]


def test_counts_are_bounds_that_the_lengths_need_not_reach(attention: Attention) -> None:
    inputs = make_inputs(Case(((1, 33), (1, 5))))
    batch = replace(inputs.batch, num_decodes=7, max_query_len=40, max_context_len=500)
    output = replace(inputs, batch=batch).run(attention)
    assert relative_error(output, inputs.run(reference_attention)) < TOLERANCE[torch.float32]


def test_torch_form_gives_a_sequence_the_same_output_in_any_batch() -> None:
    lengths = tuple((1, 1 + 37 * row % 150) for row in range(40)) + tuple((2 + row, 160 - row) for row in range(20))
    together = make_inputs(Case(lengths))
    output = together.run(paged_attention_torch)
    starts = together.batch.query_start.tolist()
    for row, (queries, context) in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        batch = make_batch(together.tables[row : row + 1], [queries], [context])
        alone = replace(together, query=together.query[part], batch=batch).run(paged_attention_torch)
        assert relative_error(output[part], alone) < 1e-6


@pytest.mark.parametrize("gather_bytes", [1, 100_000])
def test_torch_form_does_not_depend_on_the_slice_size(gather_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_inputs(MIXED).run(paged_attention_torch)
    monkeypatch.setattr(attention_torch, "_GATHER_BYTES", gather_bytes)
    assert relative_error(make_inputs(MIXED).run(paged_attention_torch), expected) < 1e-6


# trap 19: the memory is reserved, but only the blocks in use are touched.
def test_torch_form_reaches_blocks_beyond_2_to_the_31_elements() -> None:
    small = make_inputs(replace(MIXED, dtype=torch.float16))
    block_elements = small.key_cache[0].numel()
    first = 2**31 // block_elements
    cache = torch.empty((first + small.key_cache.shape[0], *small.key_cache.shape[1:]), dtype=torch.float16)
    cache[first:] = small.key_cache
    tables = small.batch.block_tables + first
    large = replace(small, key_cache=cache, value_cache=cache, batch=replace(small.batch, block_tables=tables))
    expected = replace(small, value_cache=small.key_cache).run(paged_attention_torch)
    assert torch.equal(large.run(paged_attention_torch), expected)


def test_cpu_tensors_take_the_torch_form() -> None:
    inputs = make_inputs(MIXED)
    assert torch.equal(inputs.run(paged_attention), inputs.run(paged_attention_torch))


def test_triton_form_refuses_layouts_it_cannot_read(triton_form: Attention) -> None:
    inputs = make_inputs(MIXED)
    with pytest.raises(ValueError, match=r"query has strides .* heads and head_dim must be contiguous"):
        replace(inputs, query=inputs.query.transpose(1, 2)).run(triton_form)
    with pytest.raises(ValueError, match="they must be equal"):
        replace(inputs, value_cache=inputs.value_cache[::2]).run(triton_form)
    strided = replace(inputs.batch, block_tables=inputs.batch.block_tables[:, ::2])
    with pytest.raises(ValueError, match="its rows must be contiguous"):
        replace(inputs, batch=strided).run(triton_form)
    with pytest.raises(ValueError, match=r"scale 0.0: must be positive"):
        replace(inputs, scale=0.0).run(triton_form)


def test_supported_shapes_pass_the_check() -> None:
    for head_dim, group, block_size in product(HEAD_DIMS, range(1, 17), BLOCK_SIZES):
        check_supported(2 * group, 2, head_dim, block_size)


# trap 21
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 2, 64, 16), "9 query heads over 2 key/value heads: .* must be a multiple"),
        ((4, 0, 64, 16), "must be a multiple"),
        ((34, 2, 64, 16), "17 query heads for each key/value head: 1 to 16 are supported"),
        ((8, 2, 72, 16), "head_dim 72 on cuda: supported are 64, 80, 96, 128, 256"),
        ((8, 2, 32, 16), "head_dim 32 on cuda"),
        ((8, 2, 64, 8), "block size 8: supported are 16, 32, 64, 128, 256"),
        ((8, 2, 64, 48), "block size 48"),
        ((8, 2, 64, 512), "block size 512"),
    ],
)
def test_other_shapes_are_refused_with_what_is_accepted(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_supported(*shape)


def test_small_heads_are_supported_on_a_cpu() -> None:
    check_supported(4, 2, 16, 16, device_type="cpu")
    case = Case(MIXED.lengths, head_dim=16, group=2)
    assert case_error(case, paged_attention) < TOLERANCE[case.dtype]
