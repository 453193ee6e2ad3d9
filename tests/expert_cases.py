"""Problems and float32 references shared by the CPU and the GPU tests of routing and of the experts' products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.routing import Routing, route

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Of the relative error; the reference rounds nothing."""


@dataclass(frozen=True)
class Case:
    """A mixture over random tokens. `bias` is added to the router's logits; every `padding`-th token is padding."""

    tokens: int
    experts: int = 5
    choices: int = 2
    hidden: int = 64
    inner: int = 32
    bias: tuple[float, ...] = (0.0,)
    padding: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Problem:
    """The tensors of a case, and what is expected of them in float32, zero for padding."""

    hidden: Tensor
    gate_up: Tensor
    down: Tensor
    slots: Tensor
    logits: Tensor
    routing: Routing
    expected: Tensor


def make_problem(case: Case, device: str = "cpu") -> Problem:
    """`hidden` is a slice of wider rows, as any operand with a token stride may be."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = randn(case.tokens, case.hidden + 16).to(case.dtype)[:, : case.hidden]
    gate_up = (randn(case.experts, 2 * case.inner, case.hidden) / case.hidden**0.5).to(case.dtype)
    down = (randn(case.experts, case.hidden, case.inner) / case.inner**0.5).to(case.dtype)
    logits = randn(case.tokens, case.experts) + torch.tensor(case.bias, device=device)
    slots = torch.arange(case.tokens, device=device)
    if case.padding:
        slots[case.padding - 1 :: case.padding] = -1
    routing = route(logits, slots, experts_per_token=case.choices, normalised=True)
    return Problem(
        hidden, gate_up, down, slots, logits, routing, reference_mix(hidden, gate_up, down, chosen_weights(routing))
    )


def chosen_experts(routing: Routing) -> Tensor:
    """int64 [tokens, choices]: the expert of every choice, -1 for padding."""
    tokens, choices = routing.weights.shape
    experts = torch.full((tokens * choices,), -1, device=routing.pairs.device)
    for expert, count in enumerate(routing.counts.tolist()):
        pairs = routing.pairs[expert, :count].long()
        assert bool((experts[pairs] == -1).all())
        experts[pairs] = expert
    return experts.unflatten(0, (tokens, choices))


def chosen_weights(routing: Routing) -> Tensor:
    """float32 [tokens, experts]: the weight of each expert in each token."""
    experts = chosen_experts(routing)
    weights = torch.zeros(len(experts), len(routing.counts), device=experts.device)
    return weights.scatter_add(1, experts.clamp(min=0), routing.weights.where(experts >= 0, 0.0))


def reference_mix(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """Every expert over every token, weighted by `weights` [tokens, experts], in float32."""
    total = torch.zeros(hidden.shape, device=hidden.device)
    for expert in range(len(down)):
        gate, up = F.linear(hidden.float(), gate_up[expert].float()).chunk(2, dim=-1)
        total += weights[:, expert, None] * F.linear(F.silu(gate) * up, down[expert].float())
    return total
