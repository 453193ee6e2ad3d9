"""The compiled routing and the experts' products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.experts import mix_experts
from kernels.routing import route
from tests.errors import relative_error
from tests.expert_cases import TOLERANCE, Case, chosen_experts, chosen_weights, make_problem

QWEN3_30B = Case(1, experts=128, choices=8, hidden=2048, inner=768, padding=7)
MIXTRAL = Case(1, experts=8, choices=2, hidden=4096, inner=14336, dtype=torch.bfloat16)
UNEVEN = Case(1, experts=60, choices=4, hidden=1032, inner=200)


@pytest.mark.parametrize(("experts", "choices"), [(8, 2), (60, 4), (128, 8), (256, 8)])
@pytest.mark.parametrize("tokens", [1, 777, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_on_the_gpu_equals_routing_on_the_cpu(
    experts: int, choices: int, tokens: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)
    slots = torch.arange(tokens, device="cuda")
    slots[3::5] = -1
    ours = route(logits, slots, experts_per_token=choices, normalised=True)
    expected = route(logits.cpu(), slots.cpu(), experts_per_token=choices, normalised=True)
    torch.testing.assert_close(ours.weights.cpu(), expected.weights)
    # float32 logits that lie next to each other may have equal probabilities on one of the two
    same = chosen_experts(ours).cpu() == chosen_experts(expected)
    assert float(same.float().mean()) > (0.9999 if dtype == torch.float32 else 0.999999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9, 64, 256, 512, 1024, 2500])
def test_mixture_of_qwen3_30b_matches_float32(tokens: int, dtype: torch.dtype) -> None:
    problem = make_problem(replace(QWEN3_30B, tokens=tokens, dtype=dtype), "cuda")
    mixed = mix_experts(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert relative_error(mixed, problem.expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", [MIXTRAL, UNEVEN])
@pytest.mark.parametrize("tokens", [1, 100, 1000])
def test_mixtures_of_other_sizes_match_float32(case: Case, tokens: int) -> None:
    problem = make_problem(replace(case, tokens=tokens), "cuda")
    mixed = mix_experts(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert relative_error(mixed, problem.expected) < TOLERANCE[case.dtype]


def test_results_do_not_change_from_run_to_run() -> None:
    problem = make_problem(replace(QWEN3_30B, tokens=300, dtype=torch.bfloat16), "cuda")

    def mix() -> torch.Tensor:
        routing = route(problem.logits, problem.slots, experts_per_token=8, normalised=True)
        return mix_experts(problem.hidden, problem.gate_up, problem.down, routing)

    first = mix()
    assert all(torch.equal(mix(), first) for _ in range(5))


# traps 22, 23
def test_a_graph_follows_its_inputs_whatever_their_routing() -> None:
    case = replace(QWEN3_30B, tokens=32, padding=0, dtype=torch.bfloat16)
    problem = make_problem(case, "cuda")
    hidden, logits, slots = problem.hidden.clone(), problem.logits.clone(), problem.slots.clone()

    def mix() -> torch.Tensor:
        routing = route(logits, slots, experts_per_token=8, normalised=True)
        return mix_experts(hidden, problem.gate_up, problem.down, routing)

    mix()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mix()
    for real in (32, 31, 1, 0, 32):
        hidden.copy_(torch.randn_like(hidden))
        logits.copy_(torch.randn_like(logits))
        if real == 31:
            logits[:, :8] += 99  # all tokens to the same experts
        slots.copy_(torch.arange(32, device="cuda"))
        slots[real:] = -1
        graph.replay()
        assert torch.equal(captured, mix())
        assert bool((captured[real:] == 0).all())


# trap 20
def test_experts_without_tokens_are_not_read() -> None:
    problem = make_problem(replace(QWEN3_30B, tokens=3, dtype=torch.bfloat16), "cuda")
    unused = chosen_weights(problem.routing).sum(0) == 0
    assert bool(unused.any())
    problem.gate_up[unused] = torch.nan
    problem.down[unused] = torch.nan
    mixed = mix_experts(problem.hidden, problem.gate_up, problem.down, problem.routing)
    assert relative_error(mixed, problem.expected) < TOLERANCE[torch.bfloat16]
