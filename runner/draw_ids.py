"""What rows are called by the random generator: their own ids where the source has some."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_REPEAT_STEP = 0x9E3779B97F4A7C15  # odd, so that repeats of one id are apart from each other


def draw_ids(ids: pa.ChunkedArray, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One 64-bit number a row, int64 [rows], from its id: it stays with the row in whatever order rows stand.

    An integer is its own number, another value is hashed. A null takes the row id. A second row of the
    same id takes a number of its own, by the order in which they stand, or equal prompts would get equal
    completions.
    """
    numbers = _integers(ids) if pa.types.is_integer(ids.type) else _hashes(ids.to_pylist())
    numbers = np.where(pc.is_null(ids).to_numpy(), row_ids, numbers)
    with np.errstate(over="ignore"):
        return (numbers.view(np.uint64) + _repeats(numbers) * np.uint64(_REPEAT_STEP)).view(np.int64)


def _integers(ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The ids themselves, nulls as 0, never by way of floats."""
    kind = np.uint64 if pa.types.is_unsigned_integer(ids.type) else np.int64
    return pc.fill_null(ids, 0).to_numpy().astype(kind).view(np.int64)


def _hashes(ids: list[Any]) -> npt.NDArray[np.int64]:
    digests = b"".join(blake2b(repr(each).encode(), digest_size=8).digest() for each in ids)
    return np.frombuffer(digests, "<i8").astype(np.int64)


def _repeats(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """How many earlier rows have the same number."""
    order = np.argsort(numbers, kind="stable")
    ranked = numbers[order]
    first = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1]))) if len(ranked) else order
    sizes = np.diff(np.append(first, len(ranked)))
    repeats = np.empty(len(numbers), np.uint64)
    repeats[order] = np.arange(len(ranked)) - np.repeat(first, sizes)
    return repeats
