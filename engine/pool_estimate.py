"""What the K/V pool will be, judged before any weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.kv_cache import KVCacheShape
from engine.memory_plan import CPU_POOL_BYTES, GPU_RESERVE_BYTES
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.startup import EngineSettings, Resolved


@dataclass(frozen=True, slots=True)
class PoolEstimate:
    """The pool that a job asks for, and the memory that this machine has for it; all in bytes.

    `room` is what is left beside the `weights`, 0 where they alone take more. If `is_bound`, the pool takes all
    of it that a full-size step leaves: then `pool` is more than it will be, as no step is measured yet.
    """

    weights: int
    block: int
    pool: int
    room: int
    is_bound: bool

    @property
    def num_blocks(self) -> int:
        return self.pool // self.block

    @property
    def fits(self) -> bool:
        """Whether this machine holds the pool, which has a block at least."""
        return self.block <= self.pool <= self.room


def estimate_pool(config: ModelConfig, settings: EngineSettings, resolved: Resolved) -> PoolEstimate:
    """The pool that `engine.startup.start` will make with these settings."""
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, settings.block_size, resolved.dtype)
    weights = _weight_bytes(config, resolved.dtype)
    on_gpu = resolved.device.type == "cuda"
    if on_gpu:
        room = torch.cuda.mem_get_info(resolved.device)[0] - weights - GPU_RESERVE_BYTES
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weights
    room = max(0, room)
    automatic = room if on_gpu else CPU_POOL_BYTES
    pool = automatic if settings.kv_memory is None else settings.kv_memory
    return PoolEstimate(weights, shape.block_bytes, pool, room, is_bound=on_gpu and settings.kv_memory is None)


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters, a tied head counted once: those of a decoder without storage."""
    return sum(parameter.nbytes for parameter in Decoder(config, dtype=dtype, device=torch.device("meta")).parameters())
