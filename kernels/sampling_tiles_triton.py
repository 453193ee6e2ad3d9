"""What the kernels that sample share: reading tiles of logits, and constants."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from kernels import sampling_torch

GROUP = tl.constexpr(sampling_torch.GROUP)
LOG2_E = tl.constexpr(math.log2(math.e))
MIN_TEMPERATURE = tl.constexpr(sampling_torch.MIN_TEMPERATURE)


@triton.jit
def load_tile(
    source: tl.tensor, start: tl.tensor, count: tl.tensor, LOWEST: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """TILE of the `count` logits of `source` from `start` on in float32, those beyond the end as LOWEST.

    LOWEST, the least finite value of the logits' dtype, also marks suppressed tokens. That of float16 is replaced:
    at a high temperature it would not be low enough.
    """
    offset = start + tl.arange(0, TILE)
    if start + TILE <= count:  # unmasked loads are wide, whatever the count
        logit = _to_float32(tl.load(source + offset), LOWEST)
    else:
        logit = _to_float32(tl.load(source + offset, mask=offset < count, other=LOWEST), LOWEST)
    return logit


@triton.jit
def _to_float32(logit: tl.tensor, LOWEST: tl.constexpr) -> tl.tensor:
    if logit.dtype == tl.float16:
        return tl.where(logit == LOWEST, -3.0e38, logit.to(tl.float32))
    return logit.to(tl.float32)
