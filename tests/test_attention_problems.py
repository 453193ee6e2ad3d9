from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_problems import (
    BLOCK_SIZE,
    HEAD_DIM,
    SCALE,
    Inputs,
    Problem,
    make_inputs,
    problems,
    relative_error,
)

CPU = torch.device("cpu")
MIXED = Problem("mixed", (1, 1, 40), (17, 100, 90), heads=6, kv_heads=2)
SHARED = Problem("shared", (1,) * 6, (40,) * 6, shared=32, group_size=3, heads=2, kv_heads=1)


def attend(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """torch's own attention of each sequence, in float32."""
    outputs = []
    for row, (query_len, context) in enumerate(zip(problem.query_lens, problem.context_lens, strict=True)):
        blocks = inputs.batch.block_tables[row, : -(-context // BLOCK_SIZE)].long()
        start = problem.query_start[row]
        query = inputs.query[start : start + query_len].float().transpose(0, 1)
        keys, values = (
            cache[blocks].flatten(0, 1)[:context].float().transpose(0, 1)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        mask = torch.ones(query_len, context, dtype=torch.bool).tril(context - query_len)
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True)
        outputs.append(mixed.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("problem", [MIXED, SHARED])
def test_the_error_of_exact_attention_is_nothing_and_of_any_fault_is_not(problem: Problem) -> None:
    inputs = make_inputs(problem, CPU, seed=0)
    output = attend(problem, inputs)
    assert relative_error(problem, inputs, output) < 1e-5
    shifted = output.roll(1, dims=0)
    assert relative_error(problem, inputs, shifted) > 0.1
    output[-1, 0, 0] = torch.nan
    assert not relative_error(problem, inputs, output) < 1e9


def test_groups_share_their_prefix_and_nothing_else() -> None:
    tables = make_inputs(SHARED, CPU, seed=3).batch.block_tables
    prefixes, own = tables[:, :2], tables[:, 2]
    assert prefixes[:3].unique(dim=0).shape == prefixes[3:].unique(dim=0).shape == (1, 2)
    assert sorted(torch.cat((prefixes[0], prefixes[3], own)).tolist()) == list(range(10))


def test_segments_name_the_prefix_of_every_group() -> None:
    prefixes = make_inputs(SHARED, CPU, seed=3).batch.prefixes
    assert prefixes is not None
    assert prefixes.segments[:2].tolist() == [[0, 0, 3, 0, 32], [3, 3, 3, 0, 32]]
    assert not prefixes.segments[2:].any()
    assert prefixes.own_start.tolist() == [32] * 6
    assert prefixes.own_segments[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert (prefixes.own_segments[:, 1:] == -1).all()
    assert make_inputs(MIXED, CPU, seed=0).batch.prefixes is None


def test_bytes_count_a_shared_prefix_once_a_group() -> None:
    keys = 2 * 32 + 6 * 8
    assert SHARED.bytes_moved == 2 * HEAD_DIM * (2 * keys + 2 * 6 * 2)


def test_flops_leave_out_keys_that_a_query_does_not_see() -> None:
    pairs = 17 + 100 + 40 * 50 + 40 * 41 // 2
    assert MIXED.flops == 4 * HEAD_DIM * 6 * pairs


def test_every_problem_has_a_name_of_its_own_and_single_tokens_first() -> None:
    table = problems()
    assert len({problem.name for problem in table}) == len(table) == 24
    for problem in table:
        decodes = problem.query_lens.count(1)
        assert problem.query_lens[:decodes] == (1,) * decodes
        assert problem.shared % BLOCK_SIZE == 0
        assert all(q <= c - problem.shared for q, c in zip(problem.query_lens, problem.context_lens, strict=True))
