"""Keys of the sampling noise, which depends on nothing but the identity of the token to be drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Integers = int | npt.NDArray[np.int64]


def row_key(seed: Integers, draw_id: Integers, sample: Integers) -> Keys:
    """What the noise keys of a sequence have in common, uint64; elementwise for arrays of one shape.

    It and the position of a token alone decide the token's noise, so that batch, order and preemption cannot
    change it.
    """
    key = np.zeros(np.shape(seed), np.uint64)
    for part in (seed, draw_id, sample):
        key = _absorb(key, part)
    return key


def position_keys(row_keys: Keys, position: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [rows, 2]: noise keys of the tokens at `position` [rows], counted from the start of their sequences."""
    return _absorb(row_keys, position).view(np.int32).reshape(-1, 2)


def _absorb(key: Keys, part: Integers) -> Keys:
    return _splitmix64(key ^ np.asarray(part, np.int64).astype(np.uint64))


def _splitmix64(value: Keys) -> Keys:
    """The splitmix64 step (Steele, Lea and Flood, 2014); wraps modulo 2**64."""
    with np.errstate(over="ignore"):  # NumPy warns of it for single numbers
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
