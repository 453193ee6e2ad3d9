"""Attention for Hopper's tensor cores (compute capability 9.0), in Gluon.

Gluon programs say which warps do what, and when a copy or a product is waited for; Triton's interpreter cannot run
them. The other modules of this package can be imported only where Gluon is.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def serves(query: Tensor) -> bool:
    """Whether attention of `query` is computed here: in a half type, on a Hopper GPU."""
    return query.dtype != torch.float32 and _is_hopper(query.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
