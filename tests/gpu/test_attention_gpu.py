"""The compiled attention kernels over their whole range of shapes."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels.attention import paged_attention
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

Lengths = tuple[tuple[int, int], ...]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DECODES = ((1, 1), (1, 16), (1, 129), (1, 700))
CHUNKS = ((7, 30), (40, 300), (150, 150), (260, 1000))
"""Their lengths reach every size of prefill tile."""


def assert_cases_match(cases: list[Case], compilers: Executor) -> None:
    errors = compilers.map(gpu_error, cases)
    wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error < TOLERANCE[case.dtype]}
    assert not wrong


def gpu_error(case: Case) -> float:
    return case_error(case, paged_attention, "cuda")


# trap 21
def test_every_group_and_block_size_matches_the_reference(compilers: Executor) -> None:
    """Each with every head size, but not all three with each other: a case is a kernel to compile."""
    cases = []
    for (at, group), (turn, block_size) in product(enumerate(GROUPS), enumerate(BLOCK_SIZES)):
        head_dim = HEAD_DIMS[(at + turn) % len(HEAD_DIMS)]
        cases.append(Case((*DECODES, CHUNKS[at % len(CHUNKS)]), head_dim, group, block_size, torch.bfloat16))
    assert_cases_match(cases, compilers)


# trap 21
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_matches_the_reference(dtype: torch.dtype, compilers: Executor) -> None:
    shapes = [(head_dim, 4) for head_dim in HEAD_DIMS] + [(64, 1), (64, 16)]
    assert_cases_match([Case(DECODES + CHUNKS, head_dim, group, 16, dtype) for head_dim, group in shapes], compilers)


# trap 24
@pytest.mark.parametrize("dtype", DTYPES)
def test_sliding_windows_match_the_reference(dtype: torch.dtype, compilers: Executor) -> None:
    lengths = DECODES + CHUNKS
    cases = [Case(lengths, head_dim, 4, 16, dtype, window=100) for head_dim in HEAD_DIMS]
    cases += [Case(lengths, 128, 4, 16, dtype, window) for window in (1, 64, 65, 999, 5000)]
    assert_cases_match(cases, compilers)


def test_steps_of_decodes_alone_and_of_chunks_alone_match_the_reference() -> None:
    for lengths in (DECODES, DECODES * 50, *((chunk,) for chunk in CHUNKS), CHUNKS * 10):
        assert gpu_error(Case(lengths, 128, 4, 16, torch.bfloat16)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "lengths",
    [
        ((1, 40_000),),
        ((1, 9), (1, 30_000), (1, 1)) * 3,
        ((1, 500),) * 1500,
        tuple((1, 1 + 37 * row % 611) for row in range(400)),
    ],
)
def test_decodes_cut_over_many_programs_and_many_decodes_match_the_reference(lengths: Lengths) -> None:
    assert gpu_error(Case(lengths, 128, 4, 16, torch.bfloat16)) < TOLERANCE[torch.bfloat16]


def test_repeated_launches_give_the_same_bits() -> None:
    inputs = make_inputs(Case((*DECODES, (1, 20_000), (1, 5_000)), 128, 4, 16, torch.bfloat16), "cuda")
    expected = inputs.run(paged_attention)
    for _ in range(100):
        assert torch.equal(inputs.run(paged_attention), expected)


# traps 22, 23
@pytest.mark.parametrize("lengths", [((1, 700), (1, 3), (1, 9000), (1, 64)), ((1, 700), (40, 300), (1, 9000), (7, 30))])
def test_a_captured_graph_is_replayed_with_other_lengths_and_padding(lengths: Lengths) -> None:
    inputs = make_inputs(Case(lengths, 128, 4, 16, torch.bfloat16), "cuda")
    batch = replace(inputs.batch)  # a graph needs one of its own: plans made outside of it stay as they are
    inputs.run(paged_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = paged_attention(
            inputs.query, inputs.key_cache, inputs.value_cache, batch, scale=inputs.scale, sliding_window=None
        )
    query_lens = [queries for queries, _ in lengths]
    contexts = [context for _, context in lengths]
    for real, shorter in [(4, 0), (4, 2), (3, 1), (2, 0), (1, 690), (4, 0)]:
        lens = [max(context - shorter, queries) for queries, context in lengths[:real]]
        padding = [0] * (4 - real)
        batch.context_lens.copy_(torch.tensor(lens + padding))
        batch.query_start[1:].copy_(torch.tensor(query_lens[:real] + padding).cumsum(0))
        graph.replay()
        expected = inputs.run(reference_attention)
        assert relative_error(output[: len(expected)], expected) < TOLERANCE[torch.bfloat16]
    assert contexts == batch.context_lens.tolist()


# trap 20
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_unused_slots_and_table_entries_reach_no_output(dtype: torch.dtype, window: int | None) -> None:
    case = Case(DECODES + CHUNKS, 128, 4, 16, dtype, window)
    clean = make_inputs(case, "cuda", poison=(0.0, 0.0), unused_id=0).run(paged_attention)
    nan, inf = float("nan"), float("inf")
    for poison, unused_id in [((nan, nan), 2**31 - 1), ((inf, -inf), -1)]:
        dirty = make_inputs(case, "cuda", poison=poison, unused_id=unused_id).run(paged_attention)
        assert torch.equal(dirty, clean)


# trap 5
def test_a_later_chunk_attends_to_what_earlier_chunks_wrote() -> None:
    whole = make_inputs(Case(((600, 600),), 128, 4, 16, torch.bfloat16), "cuda")
    expected = whole.run(paged_attention)
    key_cache = torch.full_like(whole.key_cache, float("nan"))
    value_cache = torch.full_like(whole.value_cache, float("nan"))
    table = whole.tables
    for start, end in [(0, 100), (100, 101), (101, 300), (300, 600)]:
        position = torch.arange(start, end, device="cuda")
        block, offset = table[0, position // 16].long(), position % 16
        key_cache[block, offset] = whole.key_cache[block, offset]
        value_cache[block, offset] = whole.value_cache[block, offset]
        batch = make_batch(table, [end - start], [end])
        chunk = replace(whole, query=whole.query[start:end], key_cache=key_cache, value_cache=value_cache, batch=batch)
        assert relative_error(chunk.run(paged_attention), expected[start:end]) < TOLERANCE[torch.bfloat16]


# trap 19
def test_blocks_beyond_2_to_the_31_elements_are_read() -> None:
    small = make_inputs(Case(DECODES + CHUNKS, 128, 4, 16, torch.bfloat16, kv_heads=8), "cuda")
    first = 2**31 // small.key_cache[0].numel()
    shape = (first + small.key_cache.shape[0], *small.key_cache.shape[1:])
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    caches[0][first:] = small.key_cache
    caches[1][first:] = small.value_cache
    used = small.batch.block_tables < small.key_cache.shape[0]
    tables = torch.where(used, small.batch.block_tables + first, small.batch.block_tables)
    batch = replace(small.batch, block_tables=tables)
    large = replace(small, key_cache=caches[0], value_cache=caches[1], batch=batch)
    assert torch.equal(large.run(paged_attention), small.run(paged_attention))
