"""The K/V storage that block ids point into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_COPIED_AT_ONCE = 16
"""Blocks: 32 MiB of Llama-3.1-8B's."""


@dataclass(frozen=True)
class KVCacheShape:
    """Size of a K/V cache, apart from its number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in every layer."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class KVCache:
    """Keys and values of all layers, [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Not initialised: what no sequence wrote may hold anything, NaN included, and must not be read.
    """

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (shape.num_layers, 2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._storage = torch.empty(size, dtype=shape.dtype, device=device)

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value cache of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._storage[index, 0], self._storage[index, 1]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Let blocks `targets` int64 [copies] hold what `sources` int64 [copies] hold, in every layer.

        No block may be in both. A few at a time, since each part is gathered before it is written.
        """
        for source, target in zip(sources.split(_COPIED_AT_ONCE), targets.split(_COPIED_AT_ONCE), strict=True):
            self._storage[:, :, target] = self._storage[:, :, source]
