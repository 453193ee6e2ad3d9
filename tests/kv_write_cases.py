"""Rows, slots and caches shared by the CPU and the GPU tests of the K/V write."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 16
NUM_BLOCKS = 8


def make_rows(
    tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv_heads, head_dim], slices of a wider tensor as they are of a fused projection."""
    generator = torch.Generator(device).manual_seed(0)
    fused = torch.randn(tokens, 6 * kv_heads, head_dim, generator=generator, device=device).to(dtype)
    return fused[:, 4 * kv_heads : 5 * kv_heads], fused[:, 5 * kv_heads :]


def make_slots(tokens: int, device: str = "cpu") -> Tensor:
    """Different slots in no order."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    return slots[:tokens].to(device)


def make_caches(kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Key and value cache of NUM_BLOCKS blocks, filled with a value that no row holds."""
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    return cache, cache.clone()
