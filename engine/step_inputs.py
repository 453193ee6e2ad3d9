"""What a forward pass reads, as arrays on the host and as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.batch import Batch
from engine.upload import Array

NOWHERE = -1
"""Slot mapping of a padding token: its keys and values are written nowhere."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step; `engine.batch.Batch` says what they hold. `table_rows` int32 are its slots."""

    slot_mapping: Tensor
    positions: Tensor
    token_ids: Tensor
    query_start: Tensor
    context_lens: Tensor
    table_rows: Tensor


def input_arrays(batch: Batch) -> list[Array]:
    """The arrays of a batch in the order of `StepInputs`."""
    return [
        batch.slot_mapping,
        batch.positions,
        batch.token_ids,
        batch.query_start,
        batch.context_lens,
        batch.slots.astype(np.int32),
    ]


def padded_arrays(batch: Batch | None, size: int) -> list[Array]:
    """The arrays of a batch, or of none, with padding up to `size` tokens and as many sequences.

    Padding tokens belong to no sequence, and padding sequences have neither query tokens nor context.
    """
    if batch is None:
        return [
            np.full(size, NOWHERE, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int32),
            np.zeros(size + 1, np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.int32),
        ]
    fills = (NOWHERE, 0, 0, batch.query_start[-1], 0, 0)
    lengths = (size, size, size, size + 1, size, size)
    return [_padded(*item) for item in zip(input_arrays(batch), lengths, fills, strict=True)]


def _padded(array: Array, length: int, fill: int) -> Array:
    padded = np.full(length, fill, array.dtype)
    padded[: len(array)] = array
    return padded
