"""Measured tile shapes of the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeTile:
    """Work of one program's turn, and how many programs share a multiprocessor."""

    keys: int
    """Keys of a tile, a power of two of at least 16."""
    stages: int
    """Pipeline stages: one tile less is in flight."""
    warps: int
    programs: int
    """Programs of a multiprocessor that an H200 holds at a time; a GPU with less shared memory gets fewer."""


# Measured on one H200 (all of it in benchmarks/results/tiles_decode.jsonl): microseconds of 256 sequences x 512,
# 256 x 2048, 64 x 8192, 256 ragged and 1 x 131072 keys (bfloat16, head_dim 128, blocks of 16, groups of 4). One tile
# serves from 1 to 1024 sequences: what hides latency is four programs of a multiprocessor, each with 32 KiB in flight.
# By now Hopper GPUs have a kernel of their own in half types (kernels/hopper/decode.py).
#
#     keys  stages  warps  programs   256x512  256x2048  64x8192   ragged  1x131072
#       64       2      2         4       142       509      507      180       146
#      128       2      4         2       145       516      515      184       149
#       32       3      2         4       146       522      512      185       149
#       64       3      4         2       146       522      543      192       152
#       64       2      2         8       143       515      511      188       178
_HALF = DecodeTile(keys=64, stages=2, warps=2, programs=4)
# These two are checked for spilled registers, not tuned.
_HALF_WIDE = DecodeTile(keys=32, stages=2, warps=4, programs=2)
_FLOAT32 = DecodeTile(keys=32, stages=2, warps=4, programs=2)


def decode_tile(dtype: torch.dtype, padded_dim: int) -> DecodeTile:
    """The tile for a cache of `dtype` whose head size is `padded_dim`, rounded up to a power of two."""
    if dtype == torch.float32:
        return _FLOAT32
    return _HALF if padded_dim <= 128 else _HALF_WIDE
