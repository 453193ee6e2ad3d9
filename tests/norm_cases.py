"""Problems shared by the CPU and the GPU tests of the norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative error (Frobenius norm) against float32: for half types, two roundings."""


def make_inputs(rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x [rows, size] and weight [size]; the rows are parts of longer ones."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, size + 16, generator=generator, device=device).to(dtype)[:, :size]
    return x, torch.randn(size, generator=generator, device=device).to(dtype)


def check(norm: Callable[..., Tensor], rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Assert that the result is the norm, and that it goes into `out`."""
    x, weight = make_inputs(rows, size, dtype, device)
    values = x.float()
    expected = values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()
    out = torch.full_like(x, torch.nan)
    assert norm(x, weight, EPS, out) is out
    assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
