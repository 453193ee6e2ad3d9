"""A mixture of experts in place of a decoder layer's MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.layers import Linear, RMSNorm, parameter
from kernels.experts import mix_experts
from kernels.routing import route


class SparseMLP(nn.Module):
    """Each token's most probable experts, weighted by their probability (https://arxiv.org/abs/1701.06538).

    Router and experts all read the normed rows, so the norm comes before their products.

    `gate_up` is [experts, 2 * inner, hidden], the gate's rows before up's, and `down` [experts, hidden, inner].
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        count, inner = experts.num_experts, experts.intermediate_size
        self.experts_per_token = experts.experts_per_token
        self.normalised = experts.normalised
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.router = Linear(hidden, count, bias=False, dtype=dtype, device=device)
        self.gate_up = parameter(count, 2 * inner, hidden, dtype=dtype, device=device)
        self.down = parameter(count, hidden, inner, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, slot_mapping: Tensor, counts: Tensor) -> None:
        """Add to the residual stream `hidden` [tokens, hidden] in place.

        `slot_mapping` is int64 [tokens]; a token with a negative slot is padding, chooses no expert, and
        stays as it is. `counts` int32 [experts] are zeros, for the routing.
        """
        normed = self.norm(hidden)
        routing = route(
            self.router(normed),
            slot_mapping,
            experts_per_token=self.experts_per_token,
            normalised=self.normalised,
            counts=counts,
        )
        mix_experts(normed, self.gate_up, self.down, routing, residual=hidden)
