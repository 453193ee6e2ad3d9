"""What decoder layers are made of: projections, norms, the dense MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from kernels.activation import silu_and_mul
from kernels.epilogue import Epilogue
from kernels.norm import rms_norm


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

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the projection of `x` to `hidden` in place."""
        hidden.addmm_(x, self.weight.t())
        if self.bias is not None:
            hidden.add_(self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm of [tokens, size]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, out)


class NormedLinear(nn.Module):
    """A projection of normed rows, whose norm is put off until after the product.

    A norm multiplies columns by its weight and rows by their inverse root mean square. The first can be done once,
    to the columns of `weight`, and the second after the product, by the kernel that reads it: no kernel of its own
    norms the rows. In float16 the product of rows as they are might overflow, so there they are normed before.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(inputs, eps, dtype=dtype, device=device)
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None
        self.deferred = dtype != torch.float16

    def fold_norm(self) -> None:
        """Once, after loading: multiply the weight of a deferred norm into `weight`. `norm` is not used then."""
        if self.deferred:
            self.weight.mul_(self.norm.weight)  # Computed in float32 and rounded once, as torch does for all dtypes.

    def forward(self, x: Tensor) -> tuple[Tensor, Epilogue]:
        """The product of [tokens, inputs], and what its reader has to do to it; the reader needs `x` unchanged."""
        if self.deferred:
            return F.linear(x, self.weight), Epilogue(x, self.norm.eps, self.bias)
        return F.linear(self.norm(x), self.weight), Epilogue(bias=self.bias)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of the normed x; gate and up are one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = NormedLinear(hidden, 2 * inner, bias, config.rms_norm_eps, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> None:
        """Add to the residual stream `hidden` [tokens, hidden] in place."""
        self.down_proj.add_to(hidden, silu_and_mul(*self.gate_up_proj(hidden)))
