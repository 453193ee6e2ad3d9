"""Both forms of routing against transformers' routers. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.routing import Routing, route
from tests.expert_cases import chosen_experts, chosen_weights
from tests.interpreted import interpreted
from tests.tiny_models import tiny_config

Route = Callable[..., Routing]


@pytest.fixture(params=["torch", "triton"])
def route_form(request: pytest.FixtureRequest) -> Route:
    if request.param == "torch":
        return route
    return interpreted("kernels.routing_triton").route_triton


def _logits(tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (6, 2), (8, 8), (60, 3), (128, 8), (256, 5)])
@pytest.mark.parametrize("normalised", [False, True])
def test_choices_and_weights_equal_qwen3_moe(route_form: Route, experts: int, choices: int, normalised: bool) -> None:
    config = tiny_config(
        "qwen3_moe", num_experts=experts, num_experts_per_tok=choices, norm_topk_prob=normalised, hidden_size=experts
    )
    router = Qwen3MoeTopKRouter(config)
    router.weight.data = torch.eye(experts)
    logits = _logits(7, experts)
    _, weights, chosen = router(logits)

    ours = route_form(logits, torch.arange(7), experts_per_token=choices, normalised=normalised)

    assert torch.equal(chosen_experts(ours), chosen)
    torch.testing.assert_close(ours.weights, weights, rtol=1e-6, atol=1e-7)


def test_choices_and_weights_equal_mixtral(route_form: Route) -> None:
    router = MixtralTopKRouter(tiny_config("mixtral", hidden_size=6))
    router.weight.data = torch.eye(6)
    logits = _logits(9, 6)
    _, weights, chosen = router(logits)

    ours = route_form(logits, torch.arange(9), experts_per_token=2, normalised=True)

    assert torch.equal(chosen_experts(ours), chosen)
    torch.testing.assert_close(ours.weights, weights, rtol=1e-6, atol=1e-7)


def test_of_equal_probabilities_the_lower_expert_is_chosen(route_form: Route) -> None:
    logits = torch.tensor([[0.0] * 6, [1, 2, 2, 0, 2, 2], [3, 1, 1, 1, 1, 1]])
    ours = route_form(logits, torch.arange(3), experts_per_token=3, normalised=False)
    assert chosen_experts(ours).tolist() == [[0, 1, 2], [1, 2, 4], [0, 1, 2]]


def test_bfloat16_logits_with_many_ties_have_the_weights_of_the_most_probable(route_form: Route) -> None:
    logits = (_logits(20, 128) * 4).round().bfloat16()
    ours = route_form(logits, torch.arange(20), experts_per_token=8, normalised=False)
    expected = torch.softmax(logits.float(), -1).topk(8).values
    torch.testing.assert_close(ours.weights, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(chosen_weights(ours).sum(1), expected.sum(1), rtol=1e-5, atol=0)


# trap 22
def test_padding_chooses_no_expert_and_weighs_nothing(route_form: Route) -> None:
    slots = torch.tensor([3, -1, 0, -16, -1, 9])
    logits = _logits(6, 8)
    ours = route_form(logits, slots, experts_per_token=2, normalised=True)
    alone = route_form(logits[slots >= 0], slots[slots >= 0], experts_per_token=2, normalised=True)
    assert int(ours.counts.sum()) == 6
    assert bool((chosen_experts(ours)[slots < 0] == -1).all())
    assert bool((ours.weights[slots < 0] == 0).all())
    assert torch.equal(chosen_experts(ours)[slots >= 0], chosen_experts(alone))
    assert torch.equal(ours.weights[slots >= 0], alone.weights)


# trap 37
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_bad_logits_of_one_token_leave_the_others_alone(route_form: Route, value: float) -> None:
    logits = _logits(5, 12)
    expected = route_form(logits, torch.arange(5), experts_per_token=3, normalised=True)
    logits[2] = value
    ours = route_form(logits, torch.arange(5), experts_per_token=3, normalised=True)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(chosen_experts(ours)[others], chosen_experts(expected)[others])
    assert torch.equal(ours.weights[others], expected.weights[others])
    assert chosen_experts(ours)[2].unique().numel() == 3


def test_logits_may_have_a_stride_over_tokens(route_form: Route) -> None:
    wide = _logits(5, 40)
    ours = route_form(wide[:, 8:20], torch.arange(5), experts_per_token=3, normalised=True)
    expected = route_form(wide[:, 8:20].contiguous(), torch.arange(5), experts_per_token=3, normalised=True)
    assert torch.equal(chosen_experts(ours), chosen_experts(expected))


def test_counts_may_lie_in_zeros_that_are_given(route_form: Route) -> None:
    counts = torch.zeros(2, 8, dtype=torch.int32)
    logits = _logits(9, 8)
    ours = route_form(logits, torch.arange(9), experts_per_token=2, normalised=True, counts=counts[1])
    expected = route_form(logits, torch.arange(9), experts_per_token=2, normalised=True)
    assert torch.equal(chosen_experts(ours), chosen_experts(expected))
    assert torch.equal(counts[1], expected.counts)
    assert not counts[0].any()


def test_no_tokens_give_empty_lists(route_form: Route) -> None:
    ours = route_form(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), experts_per_token=2, normalised=True)
    assert ours.weights.shape == (0, 2)
    assert ours.counts.tolist() == [0] * 8
