"""A mixture of experts in plain torch, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.routing import Routing


def mix_experts_torch(
    hidden: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *, residual: Tensor | None = None
) -> Tensor:
    """As `kernels.experts.mix_experts`, for CPU tensors."""
    tokens, choices = routing.weights.shape
    products = torch.zeros(tokens * choices, hidden.shape[1], dtype=hidden.dtype)
    for expert, count in enumerate(routing.counts.tolist()):
        if count:
            pairs = routing.pairs[expert, :count].long()
            gate, up = F.linear(hidden[pairs // choices], gate_up[expert]).chunk(2, dim=-1)
            products[pairs] = F.linear(F.silu(gate) * up, down[expert])
    weighted = products.unflatten(0, (tokens, choices)).float() * routing.weights[:, :, None]
    mixed = weighted.sum(1)
    return mixed.to(hidden.dtype) if residual is None else residual.copy_(residual + mixed)
