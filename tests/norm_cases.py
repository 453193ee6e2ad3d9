"""Problems shared by the CPU and the GPU tests of the norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative error (Frobenius norm) against float32: for half types, two roundings after that of the sum."""


def make_inputs(rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [rows, size] and weight [size]; the rows are parts of longer ones."""
    generator = torch.Generator(device).manual_seed(0)
    x, residual = torch.randn(2, rows, size + 16, generator=generator, device=device).to(dtype)[:, :, :size]
    return x, residual, torch.randn(size, generator=generator, device=device).to(dtype)


def check(norm: Callable[..., Tensor], rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Assert that the residual is the rounded sum, and the result its norm."""
    x, residual, weight = make_inputs(rows, size, dtype, device)
    total = (x.float() + residual.float()).to(dtype)
    values = total.float()
    expected = values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()
    out = torch.full_like(x, torch.nan)
    assert norm(x, residual, weight, EPS, out) is out
    assert torch.equal(residual, total)
    assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
