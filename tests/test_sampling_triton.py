"""The noise of the Triton kernels, on its own."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling_torch import gumbel_noise
from tests.interpreted import interpreted
from tests.sampling_cases import make_settings

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = interpreted("kernels.sampling_triton")

exponential = kernels._exponential
minus_log1p_minus = kernels._minus_log1p_minus


@triton.jit
def _noise_kernel(out: tl.tensor, keys: tl.tensor, SIZE: tl.constexpr) -> None:
    place = tl.arange(0, SIZE)
    tl.store(out + place, exponential(place - SIZE // 2, tl.load(keys), tl.load(keys + 1)))


@triton.jit
def _logarithm_kernel(out: tl.tensor, source: tl.tensor, SIZE: tl.constexpr) -> None:
    offset = tl.arange(0, SIZE)
    tl.store(out + offset, minus_log1p_minus(tl.load(source + offset)))


def test_noise_is_that_of_the_torch_form() -> None:
    size = 2**18
    settings, out = make_settings(1), torch.empty(1, size)
    _noise_kernel[(1,)](out, settings.keys, SIZE=size)
    expected = gumbel_noise(settings.keys, torch.arange(-size // 2, size // 2, dtype=torch.int32))
    torch.testing.assert_close(-out.double().log(), expected.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [-33, -26, -24, -12, -2])
def test_logarithm_is_exact_down_to_the_least_noise(exponent: int) -> None:
    size = 4096
    u = torch.linspace(1, 3.999, size) * 2.0**exponent
    for source in (u, (1 - u).clamp(2.0**-33, 1 - 2.0**-24)):
        out = torch.empty(size)
        _logarithm_kernel[(1,)](out, source, SIZE=size)
        torch.testing.assert_close(out.double(), -torch.log1p(-source.double()), rtol=3e-7, atol=0)
