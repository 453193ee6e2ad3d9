"""Which experts of a mixture compute which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The (token, expert) pairs of a step, grouped by expert. Pair `token * k + i` is a token's i-th choice of k.

    Attributes:
        weights: float32 [tokens, k], the share of each choice in its token's output, falling; 0 for padding.
        pairs: int32 [experts, tokens]. Row `e` begins with the pairs of expert `e`, in any order; what
            follows them is unset.
        counts: int32 [experts], the number of pairs of each expert. Padding tokens have none.
    """

    weights: Tensor
    pairs: Tensor
    counts: Tensor


def route(
    logits: Tensor,
    slot_mapping: Tensor,
    *,
    experts_per_token: int,
    normalised: bool,
    counts: Tensor | None = None,
) -> Routing:
    """Choose the most probable experts of every token; of equal ones those of lower index.

    Probabilities are the softmax of the logits in float32. Logits of NaN or infinity choose some experts and
    disturb no other token. CUDA tensors are computed by a Triton kernel, CPU tensors by torch.

    Args:
        logits: [tokens, experts] of the router. The stride over tokens is free.
        slot_mapping: int64 [tokens]; a token with a negative slot is padding and chooses none.
        experts_per_token: 1 to experts.
        normalised: scale the chosen probabilities of a token to sum to 1.
        counts: int32 [experts] of zeros that become those of the result; None: new ones.
    """
    if logits.is_cuda:
        from kernels.routing_triton import route_triton  # Triton is not there without a GPU platform.

        return route_triton(
            logits, slot_mapping, experts_per_token=experts_per_token, normalised=normalised, counts=counts
        )
    return _route_torch(logits, slot_mapping, experts_per_token, normalised, counts)


def _route_torch(
    logits: Tensor, slot_mapping: Tensor, experts_per_token: int, normalised: bool, counts: Tensor | None
) -> Routing:
    tokens, experts = logits.shape
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # A stable sort puts equal probabilities in the order of their experts, which topk does not promise.
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, chosen = (part[:, :experts_per_token] for part in ordered)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    routed = (slot_mapping >= 0)[:, None]
    choices = torch.where(routed, chosen, experts).flatten()
    counted = torch.bincount(choices, minlength=experts + 1)[:experts].int()
    counts = counted if counts is None else counts.copy_(counted)
    pairs = torch.empty(experts, tokens, dtype=torch.int32)
    by_expert = choices.argsort(stable=True).int()
    start = 0
    for row, count in zip(pairs, counts.tolist(), strict=True):
        row[:count] = by_expert[start : start + count]
        start += count
    return Routing(weights=weights.where(routed, 0.0), pairs=pairs, counts=counts)
