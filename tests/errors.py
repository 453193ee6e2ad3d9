"""How far a result is from its reference."""

from __future__ import annotations

from torch import Tensor


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, in float32; NaN if either holds one."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())
