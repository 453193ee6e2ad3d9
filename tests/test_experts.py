"""Both forms of the experts' products against float32. Without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.experts import mix_experts
from kernels.routing import Routing
from tests.errors import relative_error
from tests.expert_cases import TOLERANCE, Case, make_problem
from tests.interpreted import interpreted

Mix = Callable[..., Tensor]

CASES = {
    "one token": Case(1),
    "more tokens than a tile has rows": Case(45),
    "experts without tokens": Case(9, experts=40),
    "one expert with all tokens": Case(33, choices=1, bias=(0.0, 0.0, 99.0, 0.0, 0.0)),
    "only the last expert": Case(5, choices=1, bias=(0.0, 0.0, 0.0, 0.0, 99.0)),
    "every expert for every token": Case(7, choices=5),
    "eight choices": Case(6, experts=11, choices=8),
    "one choice": Case(12, choices=1),
    "one expert": Case(4, experts=1, choices=1),
    "sizes that no tile divides": Case(10, hidden=88, inner=40),
    "padding": Case(20, padding=3),
    "padding alone": Case(3, padding=1),
}


@pytest.fixture
def triton_form() -> Mix:
    return interpreted("kernels.experts_triton").mix_experts_triton


@pytest.fixture(params=["torch", "triton"])
def mix(request: pytest.FixtureRequest) -> Mix:
    return mix_experts if request.param == "torch" else request.getfixturevalue("triton_form")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_weighted_sum_of_the_chosen_experts_matches_float32(mix: Mix, case: Case) -> None:
    problem = make_problem(case)
    mixed = mix(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert mixed.dtype == problem.hidden.dtype
    torch.testing.assert_close(mixed, problem.expected, rtol=1e-5, atol=1e-5)


# The interpreter multiplies bfloat16 as if it were integers, so there float16 stands for it; a GPU test has both.
# Tokens an expert: the mean is below 8, 16, 32 and above, where other tiles are chosen.
@pytest.mark.parametrize("tokens", [3, 20, 40, 90, 150])
def test_tiles_of_every_size_match_float32(triton_form: Mix, tokens: int) -> None:
    problem = make_problem(Case(tokens, experts=3, choices=2, hidden=136, inner=72, dtype=torch.float16))
    mixed = triton_form(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert relative_error(mixed, problem.expected) < TOLERANCE[torch.float16]


def test_torch_form_computes_bfloat16() -> None:
    problem = make_problem(Case(20, dtype=torch.bfloat16))
    mixed = mix_experts(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert relative_error(mixed, problem.expected) < TOLERANCE[torch.bfloat16]


def test_the_order_of_pairs_within_an_expert_changes_nothing(mix: Mix) -> None:
    problem = make_problem(Case(30))
    pairs = problem.routing.pairs.clone()
    for row, count in zip(pairs, problem.routing.counts.tolist(), strict=True):
        row[:count] = row[:count].flip(0)
    turned = replace(problem.routing, pairs=pairs)
    operands = problem.hidden, problem.gate_up, problem.down
    torch.testing.assert_close(mix(*operands, turned), mix(*operands, problem.routing), rtol=0, atol=1e-6)


# traps 20, 22
def test_padding_and_experts_without_tokens_are_not_read(mix: Mix) -> None:
    case = Case(12, experts=6, padding=4, bias=(0.0, 0.0, -99.0, 0.0, 0.0, 0.0))
    problem = make_problem(case)
    problem.hidden[3::4] = torch.nan
    problem.gate_up[2] = torch.nan
    problem.down[2] = torch.nan
    mixed = mix(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert bool((mixed[3::4] == 0).all())
    torch.testing.assert_close(mixed, problem.expected, rtol=1e-5, atol=1e-5)


def test_the_sum_is_added_to_a_residual_in_place_and_padding_stays(mix: Mix) -> None:
    problem = make_problem(Case(12, padding=4))
    residual = torch.randn(12, 64, generator=torch.Generator().manual_seed(2))
    expected = residual + problem.expected
    operands = problem.hidden, problem.gate_up, problem.down, problem.routing
    assert mix(*operands, residual=residual) is residual
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_give_no_rows(mix: Mix) -> None:
    problem = make_problem(Case(4))
    routing = Routing(torch.empty(0, 2), torch.empty(5, 0, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    assert mix(problem.hidden[:0], problem.gate_up, problem.down, routing).shape == (0, 64)


def test_triton_form_refuses_a_residual_of_another_layout(triton_form: Mix) -> None:
    problem = make_problem(Case(4))
    operands = problem.hidden, problem.gate_up, problem.down, problem.routing
    for residual in (torch.zeros(5, 64), torch.zeros(64, 4).T):
        with pytest.raises(ValueError, match="residual"):
            triton_form(*operands, residual=residual)


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("hidden", lambda t: t[:, ::2], "do not fit together"),
        ("hidden", lambda t: t.half(), "they must be equal"),
        ("down", lambda t: t[:, :, :16], "do not fit together"),
        ("down", lambda t: t.mT.contiguous().mT, "must be contiguous"),
        ("gate_up", lambda t: t.mT.contiguous().mT, "must be contiguous"),
    ],
)
def test_triton_form_refuses_what_it_cannot_read(
    triton_form: Mix, part: str, wrong: Callable[[Tensor], Tensor], message: str
) -> None:
    problem = make_problem(Case(4))
    operands = {name: getattr(problem, name) for name in ("hidden", "gate_up", "down", "routing")}
    operands[part] = wrong(operands[part])
    with pytest.raises(ValueError, match=message):
        triton_form(**operands)
