"""Decodes that read shared keys once, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.reference import reference_attention
from tests.attention_cases import TOLERANCE, Case, Inputs, make_inputs
from tests.errors import relative_error
from tests.interpreted import interpreted

attention_decode_triton = interpreted("kernels.attention_decode_triton")
attention_prefix_triton = interpreted("kernels.attention_prefix_triton")

# Spare rows of a tile see no key; their 0 / 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")

NESTED = Case(
    tuple((1, context) for context in (5, 300, 310, 290, 241, 40, 130, 97, 33)),
    segments=((1, 4, 0, 160), (6, 2, 0, 96), (1, 3, 160, 240), (2, 2, 240, 272)),
    padding=2,
)
"""Sequences without a prefix before, between and after two groups, one of them of three levels."""


def decode(inputs: Inputs) -> torch.Tensor:
    return inputs.filled(attention_decode_triton.decode_attention)


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("programs", [1, 5, 40])
def test_any_number_of_programs_matches_the_reference(
    programs: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_prefix_triton, "_programs", lambda *_: programs)
    inputs = make_inputs(replace(NESTED, group=group))
    expected = inputs.run(reference_attention)
    assert relative_error(decode(inputs)[: len(expected)], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (80, 16), (256, 16)])
def test_head_and_block_sizes_match_the_reference(head_dim: int, block_size: int) -> None:
    segments = ((1, 4, 0, 160), (6, 2, 0, 96), (2, 3, 160, 224))
    inputs = make_inputs(replace(NESTED, head_dim=head_dim, block_size=block_size, segments=segments))
    expected = inputs.run(reference_attention)
    assert relative_error(decode(inputs)[: len(expected)], expected) < TOLERANCE[torch.float32]


def test_rows_of_prefills_and_padding_are_left_alone() -> None:
    case = replace(NESTED, lengths=(*NESTED.lengths, (7, 30), (1, 20)))
    inputs = make_inputs(case)
    output = decode(inputs)
    prefill = slice(len(NESTED.lengths), len(NESTED.lengths) + 7)
    assert output[prefill].isnan().all()
    assert output[prefill.stop + 1 :].isnan().all()
    decodes = [*range(prefill.start), prefill.stop]
    assert relative_error(output[decodes], inputs.run(reference_attention)[decodes]) < TOLERANCE[torch.float32]


def test_only_the_table_that_a_segment_names_is_read_for_it() -> None:
    inputs = make_inputs(NESTED)
    expected = decode(inputs)
    prefixes = inputs.batch.prefixes
    assert prefixes is not None
    segments = prefixes.segments.tolist()
    named = {(row, block) for row, _, _, first, end in segments for block in range(first // 16, end // 16)}
    for table_row, own_start in zip(inputs.batch.table_rows.tolist(), prefixes.own_start.tolist(), strict=True):
        for block in range(own_start // 16):
            if (table_row, block) not in named:
                inputs.batch.block_tables[table_row, block] = 2**31 - 1
    assert torch.equal(decode(inputs).nan_to_num(), expected.nan_to_num())


def test_a_window_reads_the_keys_of_each_sequence_on_their_own() -> None:
    inputs = make_inputs(replace(NESTED, window=50))
    plain = replace(inputs, batch=replace(inputs.batch, prefixes=None))
    assert torch.equal(decode(inputs).nan_to_num(), decode(plain).nan_to_num())


def test_values_may_change_between_launches_of_one_plan_shape() -> None:
    """As between the replays of a captured graph: padding in place of all segments groups nothing."""
    inputs = make_inputs(NESTED)
    expected = inputs.run(reference_attention)
    assert inputs.batch.prefixes is not None
    inputs.batch.prefixes.segments.zero_()
    inputs.batch.prefixes.own_start.zero_()
    inputs.batch.prefixes.own_segments.fill_(-1)
    assert relative_error(decode(inputs)[: len(expected)], expected) < TOLERANCE[torch.float32]
