"""The compiled kernels for prefill chunks over their whole range of shapes."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import pytest
import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_prefill_triton import prefill_attention
from kernels.reference import reference_attention
from tests.attention_cases import (
    BLOCK_SIZES,
    GROUPS,
    HEAD_DIMS,
    TOLERANCE,
    Case,
    Inputs,
    make_inputs,
)
from tests.errors import relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = ((1, 40), (7, 30), (40, 300), (2, 2), (1, 700), (150, 150), (260, 1000), (128, 128))
"""Chunks of less than half a tile, of one, and of several; decodes between them."""


def run(inputs: Inputs) -> torch.Tensor:
    return inputs.filled(prefill_attention)


def error_of(output: torch.Tensor, inputs: Inputs) -> float:
    """Relative error of the chunks' outputs; NaN if anything else was written."""
    lengths = inputs.batch.query_start.diff()
    chunks = (lengths > 1).repeat_interleave(lengths)
    chunks = torch.nn.functional.pad(chunks, (0, len(output) - len(chunks)))
    if not output[~chunks].isnan().all():
        return float("nan")
    return relative_error(output[chunks], inputs.run(reference_attention)[chunks[: inputs.batch.query_start[-1]]])


def case_error(case: Case) -> float:
    inputs = make_inputs(case, "cuda")
    return error_of(run(inputs), inputs)


def assert_cases_match(cases: list[Case], compilers: Executor) -> None:
    errors = compilers.map(case_error, cases)
    wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error < TOLERANCE[case.dtype]}
    assert not wrong


# trap 21
def test_every_head_dim_group_and_block_size_matches_the_reference(compilers: Executor) -> None:
    half = torch.bfloat16
    cases = [Case(LENGTHS, head_dim, 4, 16, half, padding=3) for head_dim in HEAD_DIMS]
    cases += [Case(LENGTHS, 128, group, 16, half) for group in GROUPS]
    cases += [Case(LENGTHS, head_dim, 2, block_size, half) for block_size in BLOCK_SIZES for head_dim in (64, 128, 256)]
    cases += [Case(LENGTHS, 80, 7, 64, half), Case(LENGTHS, 96, 6, 128, half), Case(LENGTHS, 256, 5, 32, half)]
    assert_cases_match(cases, compilers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_matches_the_reference(dtype: torch.dtype, compilers: Executor) -> None:
    assert_cases_match([Case(LENGTHS, head_dim, 4, 16, dtype) for head_dim in HEAD_DIMS], compilers)


# trap 24
@pytest.mark.parametrize("dtype", DTYPES)
def test_sliding_windows_match_the_reference(dtype: torch.dtype, compilers: Executor) -> None:
    cases = [Case(LENGTHS, 128, 4, 16, dtype, window) for window in (1, 64, 100, 129, 999, 5000)]
    cases += [Case(LENGTHS, head_dim, 3, 64, dtype, window=77) for head_dim in (64, 256)]
    assert_cases_match(cases, compilers)


def test_many_short_chunks_match_the_reference() -> None:
    case = Case(tuple((1 + row % 40, 600 - row) for row in range(500)), 128, 4, 16, torch.bfloat16)
    assert case_error(case) < TOLERANCE[case.dtype]


# trap 20
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_unused_slots_and_table_entries_reach_no_output(dtype: torch.dtype, window: int | None) -> None:
    case = Case(LENGTHS, 128, 4, 16, dtype, window)
    clean = run(make_inputs(case, "cuda", poison=(0.0, 0.0), unused_id=0))
    nan, inf = float("nan"), float("inf")
    for poison, unused_id in [((nan, nan), 2**31 - 1), ((inf, -inf), -1)]:
        dirty = run(make_inputs(case, "cuda", poison=poison, unused_id=unused_id))
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0, equal_nan=True)


# trap 19
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_beyond_2_to_the_31_elements_are_read(dtype: torch.dtype) -> None:
    small = make_inputs(Case(LENGTHS, 128, 4, 16, dtype, kv_heads=8), "cuda")
    blocks = small.key_cache.shape[0]
    first = 2**31 // small.key_cache[0].numel()
    caches = []
    for cache in (small.key_cache, small.value_cache):
        large = torch.empty((first + blocks, *cache.shape[1:]), dtype=dtype, device="cuda")
        large[first:] = cache
        caches.append(large)
    tables = small.batch.block_tables
    batch = replace(small.batch, block_tables=torch.where(tables < blocks, tables + first, tables))
    shifted = replace(small, key_cache=caches[0], value_cache=caches[1], batch=batch)
    torch.testing.assert_close(run(shifted), run(small), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_graph_is_replayed_with_other_lengths(dtype: torch.dtype) -> None:
    """Of four steps, padded to the same shapes; one has no chunk at all."""
    lengths = [
        LENGTHS,
        tuple((1, 50 + row) for row in range(8)),
        ((300, 700), (1, 9), (33, 33), (2, 400), (1, 1), (64, 64), (31, 200), (1, 3)),
        ((590, 1000), *((0, 0) for _ in range(7))),
    ]
    steps = [make_inputs(Case(each, 128, 4, 16, dtype), "cuda") for each in lengths]
    arguments = [_tensors(step) for step in steps]
    shapes = [torch.tensor([tensor.shape for tensor in same]).amax(0).tolist() for same in zip(*arguments, strict=True)]
    static = [
        torch.zeros(shape, dtype=tensor.dtype, device="cuda")
        for shape, tensor in zip(shapes, arguments[0], strict=True)
    ]
    output = torch.empty(shapes[0], dtype=dtype, device="cuda")

    def load(step: int) -> None:
        for target, source in zip(static, arguments[step], strict=True):
            target[tuple(slice(size) for size in source.shape)] = source

    def launch() -> None:
        query, key_cache, value_cache, *layout = static
        batch = AttentionBatch(*layout, num_decodes=8, max_query_len=590, max_context_len=1000)
        for _ in range(2):  # The second layer takes the plan of the first.
            replace(steps[0], query=query, key_cache=key_cache, value_cache=value_cache, batch=batch).fill(
                output, prefill_attention
            )

    load(0)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for index in (1, 2, 3, 0):
        load(index)
        output.fill_(float("nan"))
        graph.replay()
        tokens = len(steps[index].query)
        assert output[tokens:].isnan().all()
        if index == 1:
            assert output.isnan().all()
        else:
            assert error_of(output[:tokens], steps[index]) < TOLERANCE[dtype]


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    batch = inputs.batch
    return [
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        batch.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
    ]
