"""Routing as one Triton kernel: softmax, choice of experts and the lists of their pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.routing import Routing

_TOKENS = 2
"""Tokens of a program. It is one warp, so that no reduction over experts has to leave the warp."""


def route_triton(
    logits: Tensor,
    slot_mapping: Tensor,
    *,
    experts_per_token: int,
    normalised: bool,
    counts: Tensor | None = None,
) -> Routing:
    """As `kernels.routing.route`, for CUDA tensors (CPU tensors under Triton's interpreter).

    A token chooses an expert once at most, so a row of `pairs` with room for all tokens never overflows, and
    the place of a pair in it is what the expert's counter held: no pass has to sort.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=logits.device)
    pairs = torch.empty(experts, tokens, dtype=torch.int32, device=logits.device)
    if counts is None:
        counts = torch.zeros(experts, dtype=torch.int32, device=logits.device)
    if tokens:
        _route_kernel[(triton.cdiv(tokens, _TOKENS),)](
            weights,
            pairs,
            counts,
            logits,
            slot_mapping,
            tokens,
            logits.stride(0),
            EXPERTS=experts,
            PADDED_EXPERTS=triton.next_power_of_2(experts),
            CHOICES=experts_per_token,
            PADDED_CHOICES=triton.next_power_of_2(experts_per_token),
            NORMALISED=normalised,
            TOKENS=_TOKENS,
            num_warps=1,
        )
    return Routing(weights=weights, pairs=pairs, counts=counts)


# The number of tokens changes from step to step: specialised on, it would compile the kernel again.
@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    weights: tl.tensor,
    pairs: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    slot_mapping: tl.tensor,
    tokens: tl.tensor,
    logits_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    PADDED_CHOICES: tl.constexpr,
    NORMALISED: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One program routes TOKENS tokens. `counts` is zero before."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    within = token < tokens
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)[None, :]
    choice = tl.arange(0, PADDED_CHOICES)[None, :]

    logit = tl.load(logits + row[:, None] * logits_stride + expert, mask=expert < EXPERTS, other=float("-inf"))
    logit = logit.to(tl.float32)
    exponential = tl.exp(logit - tl.max(logit, 1)[:, None])
    probability = exponential / tl.sum(exponential, 1)[:, None]
    # Neither NaN nor a padding lane may be chosen: the one compares with nothing, the other is no expert.
    left = tl.where(probability == probability, probability, 0.0)
    left = tl.where(expert < EXPERTS, left, -1.0)
    chosen = tl.zeros((TOKENS, PADDED_CHOICES), tl.int32)
    weight = tl.zeros((TOKENS, PADDED_CHOICES), tl.float32)
    for i in tl.static_range(CHOICES):
        best, index = tl.max(left, 1, return_indices=True)
        chosen = tl.where(choice == i, index[:, None], chosen)
        weight = tl.where(choice == i, best[:, None], weight)
        left = tl.where(expert == index[:, None], -1.0, left)
    if NORMALISED:
        weight = weight / tl.sum(weight, 1)[:, None]

    routed = within & (tl.load(slot_mapping + row) >= 0)
    pair = (row[:, None] * CHOICES + choice).to(tl.int32)
    tl.store(weights + pair, tl.where(routed[:, None], weight, 0.0), mask=within[:, None] & (choice < CHOICES))
    listed = routed[:, None] & (choice < CHOICES)
    place = tl.atomic_add(counts + chosen, 1, mask=listed, sem="relaxed")
    tl.store(pairs + chosen.to(tl.int64) * tokens + place, pair, mask=listed)
