"""The compiled angles."""

from __future__ import annotations

import pytest
import torch

from kernels.rope import rotary_cos_sin

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error of a cosine, times 1.25."""


@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("half", [32, 40, 48, 64, 128])
def test_angles_match_the_reference_at_far_positions(half: int, dtype: torch.dtype, positions: torch.dtype) -> None:
    position = torch.randint(1_000_000, (1000,), device="cuda").to(positions)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, half, device="cuda")
    cos, sin = rotary_cos_sin(position, frequencies, 1.25, dtype)
    angles = (position[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 1.25, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(sin.double(), angles.sin() * 1.25, rtol=0, atol=TOLERANCE[dtype])
