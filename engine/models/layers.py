"""What decoder layers are made of: projections, norms, the dense MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from kernels.activation import silu_and_mul
from kernels.norm import add_rms_norm


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without gradient, its memory left unset."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias; unlike torch.nn.Linear it leaves its memory unset for the loader to fill."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the sum of a residual and what is to be added to it."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """The norm of `residual` after `x` was added to it in place; both are [tokens, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps, out)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
