"""Decodes whose keys are cut over several programs, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.reference import reference_attention
from tests.attention_cases import TOLERANCE, Case, Inputs, make_inputs
from tests.errors import relative_error
from tests.interpreted import interpreted

attention_decode_triton = interpreted("kernels.attention_decode_triton")

# Spare rows of a tile see no key; their 0 / 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

RAGGED = Case(((1, 33), (1, 700), (1, 5), (1, 64), (1, 129)))


def decode(inputs: Inputs) -> torch.Tensor:
    return inputs.filled(attention_decode_triton.decode_attention)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_any_number_of_programs_matches_the_reference(
    programs: int, group: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decode_triton, "_programs", lambda *_: programs)
    inputs = make_inputs(replace(RAGGED, group=group, window=window))
    assert relative_error(decode(inputs), inputs.run(reference_attention)) < TOLERANCE[torch.float32]


def test_counters_are_back_at_zero_and_a_second_launch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode_triton, "_programs", lambda *_: 20)
    inputs = make_inputs(RAGGED)
    first = decode(inputs)
    (plan,) = inputs.batch.plans.values()
    assert not plan.arrivals.any()
    assert torch.equal(decode(inputs), first)


def test_rows_of_prefills_and_padding_are_left_alone() -> None:
    inputs = make_inputs(Case(((7, 30), (1, 33), (2, 2), (1, 5)), padding=2))
    output = decode(inputs)
    decodes = torch.tensor([7, 10])
    written = torch.zeros(len(output), dtype=torch.bool).index_fill_(0, decodes, True)
    assert torch.equal(~output.isnan().flatten(1).any(1), written)
    assert output[~written].isnan().all()
    expected = inputs.run(reference_attention)[decodes]
    assert relative_error(output[decodes], expected) < TOLERANCE[torch.float32]


def test_a_step_without_decodes_writes_nothing() -> None:
    assert decode(make_inputs(Case(((7, 30),)))).isnan().all()
