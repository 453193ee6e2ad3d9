"""The plain Triton kernel for prefill chunks against the float32 reference, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.reference import reference_attention
from tests.attention_cases import BLOCK_SIZES, HEAD_DIMS, TOLERANCE, Case, Inputs, make_inputs
from tests.errors import relative_error
from tests.interpreted import interpreted

# Spare rows of a tile see no key of a window; their 0 / 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

prefill_attention = interpreted("kernels.attention_prefill_triton").prefill_attention

MIXED = Case(((7, 30), (1, 33), (21, 21), (1, 5), (40, 100), (2, 2)), padding=3)
"""The later chunk of a longer prompt, whole prompts and decodes in one step, in no order, and padding."""


def run(inputs: Inputs) -> Tensor:
    return inputs.filled(prefill_attention)


def in_chunks(inputs: Inputs) -> Tensor:
    """bool [tokens]: which tokens belong to a sequence with more than one."""
    lengths = inputs.batch.query_start.diff()
    chunks = (lengths > 1).repeat_interleave(lengths)
    return torch.nn.functional.pad(chunks, (0, inputs.query.shape[0] - len(chunks)))


def chunk_error(case: Case) -> float:
    inputs = make_inputs(case)
    chunks = in_chunks(inputs)
    expected = inputs.run(reference_attention)
    return relative_error(run(inputs)[chunks], expected[chunks[: len(expected)]])


# trap 21
@pytest.mark.parametrize(
    ("head_dim", "group"), [*((head_dim, 4) for head_dim in HEAD_DIMS), (64, 1), (64, 7), (64, 16)]
)
def test_every_head_dim_and_group_matches_the_reference(head_dim: int, group: int) -> None:
    case = Case(((3, 40), (9, 9)), head_dim=head_dim, group=group, kv_heads=1)
    assert chunk_error(case) < TOLERANCE[case.dtype]


# trap 21
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_matches_the_reference(block_size: int, window: int | None) -> None:
    lengths = ((5, block_size), (5, 2 * block_size + 1), (2, 300))
    case = Case(lengths, block_size=block_size, window=window, kv_heads=1)
    assert chunk_error(case) < TOLERANCE[case.dtype]


# The interpreter multiplies bfloat16 as if it were integers, so float16 stands for it; a GPU test has both.
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_chunks_of_a_mixed_step_match_the_reference(dtype: torch.dtype, window: int | None) -> None:
    assert chunk_error(replace(MIXED, dtype=dtype, window=window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 33, 100])
def test_a_long_prompt_spans_several_tiles(window: int | None) -> None:
    case = Case(((150, 150), (260, 300)), group=1, kv_heads=1, window=window, dtype=torch.float16)
    assert chunk_error(case) < TOLERANCE[case.dtype]


def test_outputs_of_decodes_and_padding_are_left_alone() -> None:
    inputs = make_inputs(MIXED)
    output = run(inputs)
    chunks = in_chunks(inputs)
    assert output[~chunks].isnan().all()
    assert output[chunks].isfinite().all()


def test_a_step_of_decodes_alone_is_left_alone() -> None:
    assert run(make_inputs(Case(((1, 33), (1, 5))))).isnan().all()


# trap 20
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unused_slots_and_table_entries_reach_no_output(dtype: torch.dtype, window: int | None) -> None:
    case = replace(MIXED, window=window, dtype=dtype)
    clean = run(make_inputs(case, poison=(0.0, 0.0), unused_id=0))
    nan, inf = float("nan"), float("inf")
    for poison in [(nan, nan), (inf, -inf)]:
        dirty = run(make_inputs(case, poison=poison, unused_id=-1))
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0, equal_nan=True)


def test_lengths_may_change_under_the_same_bounds() -> None:
    """What a replayed graph does: all that is not a tensor stays as it was."""
    inputs = make_inputs(Case(((40, 100), (1, 33), (21, 21))))
    bounds = replace(inputs.batch, num_decodes=3, max_query_len=64, max_context_len=128)
    want = inputs.run(reference_attention)
    chunks = in_chunks(inputs)
    assert relative_error(run(replace(inputs, batch=bounds))[chunks], want[chunks]) < TOLERANCE[torch.float32]
