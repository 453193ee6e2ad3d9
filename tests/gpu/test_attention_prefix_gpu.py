"""Decodes that read shared keys once, on a GPU."""

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
    Inputs,
    case_error,
    make_inputs,
    make_prefixes,
    nested_case,
)
from tests.errors import relative_error

BFLOAT16 = torch.bfloat16


def gpu_error(case: Case) -> float:
    return case_error(case, paged_attention, "cuda")


def grouped_and_plain(case: Case) -> tuple[Inputs, Inputs]:
    grouped = make_inputs(case, "cuda")
    return grouped, replace(grouped, batch=replace(grouped.batch, prefixes=None))


def test_every_group_head_and_block_size_matches_the_reference(compilers: Executor) -> None:
    """Each with every other, but not all three together: a case is two kernels to compile."""
    cases = [
        nested_case(block_size, group=group, head_dim=HEAD_DIMS[(at + turn) % len(HEAD_DIMS)], dtype=BFLOAT16)
        for (at, group), (turn, block_size) in product(enumerate(GROUPS), enumerate(BLOCK_SIZES))
        if (at + turn) % 2 == 0
    ]
    cases += [nested_case(group=4, head_dim=head_dim, dtype=torch.float16) for head_dim in (64, 128)]
    cases += [nested_case(group=group, head_dim=head_dim) for group, head_dim in ((4, 64), (16, 128), (1, 256))]
    errors = compilers.map(gpu_error, cases)
    wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error < TOLERANCE[case.dtype]}
    assert not wrong


@pytest.mark.parametrize(
    "segments",
    [
        ((0, 1000, 0, 1024),),
        ((0, 2, 0, 16),),
        tuple((first, 2, 0, 512) for first in range(0, 1000, 2)),
        tuple((first, 10, 0, 16 * (1 + first % 64)) for first in range(0, 1000, 10)),
        ((0, 1000, 0, 16), (1, 900, 16, 32), (2, 800, 32, 48), (3, 700, 48, 1024)),
    ],
)
def test_few_and_many_groups_match_the_reference(segments: tuple[tuple[int, int, int, int], ...]) -> None:
    lengths = tuple((1, 1025 + row % 130) for row in range(1000))
    grouped, plain = grouped_and_plain(Case(lengths, 128, 4, 16, BFLOAT16, segments=segments))
    expected = replace(plain, **{name: getattr(plain, name).float() for name in ("query", "key_cache", "value_cache")})
    assert relative_error(grouped.run(paged_attention), expected.run(paged_attention)) < TOLERANCE[BFLOAT16]


def test_prompt_chunks_beside_groups_match_the_reference() -> None:
    case = nested_case(group=4, head_dim=128, dtype=BFLOAT16)
    mixed = replace(case, lengths=(*case.lengths, (40, 300), (260, 1000), (1, 70)))
    assert gpu_error(mixed) < TOLERANCE[BFLOAT16]


def test_repeated_launches_give_the_same_bits() -> None:
    inputs, _ = grouped_and_plain(nested_case(group=4, head_dim=128, dtype=BFLOAT16))
    expected = inputs.run(paged_attention)
    for _ in range(100):
        assert torch.equal(inputs.run(paged_attention), expected)


def test_a_window_reads_the_keys_of_each_sequence_on_their_own() -> None:
    grouped, plain = grouped_and_plain(nested_case(group=4, head_dim=128, dtype=BFLOAT16, window=100))
    assert torch.equal(grouped.run(paged_attention), plain.run(paged_attention))


# traps 22, 23
@pytest.mark.parametrize("chunks", [(), ((40, 300), (7, 30))])
def test_a_captured_graph_is_replayed_with_other_groups_and_lengths(chunks: tuple[tuple[int, int], ...]) -> None:
    case = nested_case(group=4, head_dim=128, dtype=BFLOAT16)
    inputs, _ = grouped_and_plain(replace(case, lengths=(*case.lengths, *chunks)))
    inputs.run(paged_attention)
    batch = replace(inputs.batch)  # a graph needs one of its own: plans made outside of it stay as they are
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, batch, scale=inputs.scale)
    assert batch.prefixes is not None
    capacity = batch.prefixes.segments.shape[0]
    for segments, shorter in [
        (case.segments, 100),
        ((), 0),
        (((1, 45, 0, 128),), 1200),
        (case.segments[:2], 30),
        (((47, 2, 0, 1008),), 0),
        (case.segments, 0),
    ]:
        lens = [max(context - shorter, queries) for queries, context in (*case.lengths, *chunks)]
        batch.context_lens.copy_(torch.tensor(lens + [0] * case.padding))
        prefixes = make_prefixes(segments, batch, capacity=capacity)
        batch.prefixes.segments.copy_(prefixes.segments)
        batch.prefixes.own_start.copy_(prefixes.own_start)
        batch.prefixes.own_segments.copy_(prefixes.own_segments)
        graph.replay()
        expected = inputs.run(reference_attention)
        assert relative_error(output[: len(expected)], expected) < TOLERANCE[BFLOAT16]


# trap 20
def test_unused_slots_and_table_entries_reach_no_output() -> None:
    case = nested_case(group=4, head_dim=128, dtype=BFLOAT16)
    clean = make_inputs(case, "cuda", poison=(0.0, 0.0), unused_id=0).run(paged_attention)
    nan, inf = float("nan"), float("inf")
    for poison, unused_id in [((nan, nan), 2**31 - 1), ((inf, -inf), -1)]:
        assert torch.equal(make_inputs(case, "cuda", poison=poison, unused_id=unused_id).run(paged_attention), clean)
