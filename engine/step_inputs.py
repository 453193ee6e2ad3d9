"""What a step reads, as arrays on the host and as tensors on the device, with room for padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.batch import Batch
from engine.noise_keys import position_keys
from engine.upload import Array
from kernels.attention_batch import PREFIX_LEVELS

NOWHERE = -1
"""Slot mapping of a padding token: its keys and values are written nowhere."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step; `engine.batch.Batch` says what they hold.

    Block `changed_blocks` goes to place `changed_places` int64 of the flattened block tables. From `sampled_tokens`
    on they hold one entry for each sampled row, `keys` two, and `suppressed` pairs of (row, token id). The last three
    are those of `engine.prefix_groups.PrefixSegments`, of shape 0 where a step groups nothing.
    """

    slot_mapping: Tensor
    positions: Tensor
    token_ids: Tensor
    query_start: Tensor
    context_lens: Tensor
    table_rows: Tensor
    changed_places: Tensor
    changed_blocks: Tensor
    sampled_tokens: Tensor
    sampled_slots: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    keys: Tensor
    suppressed: Tensor
    segments: Tensor
    own_start: Tensor
    own_segments: Tensor


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for a step: `tokens`, `sequences` (and as many sampled rows), block `changes`, suppressed `pairs`.

    With `grouped` there is room for prefixes that sequences share, of which there are fewer than sequences.
    `tables` is (rows, width) of the block tables. The row after the last slot takes the changes of padding,
    and the place after the last slot its draws.
    """

    tokens: int
    sequences: int
    changes: int
    pairs: int
    tables: tuple[int, int]
    grouped: bool = False

    @property
    def spare_slot(self) -> int:
        """The slot that no sequence gets."""
        return self.tables[0] - 1

    def empty(self) -> list[Array]:
        """Arrays of this shape in the order of `StepInputs`, their content unset."""
        tokens, rows = self.tokens, self.sequences
        grouped = rows if self.grouped else 0
        return [
            *(np.empty(tokens, np.int64), np.empty(tokens, np.int64), np.empty(tokens, np.int32)),
            *(np.empty(rows + 1, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32)),
            *(np.empty(self.changes, np.int64), np.empty(self.changes, np.int32)),
            *(np.empty(rows, np.int64), np.empty(rows, np.int64)),
            *(np.empty(rows, np.float32), np.empty(rows, np.float32)),
            *(np.empty(rows, np.int32), np.empty(rows, np.float32)),
            *(np.empty((rows, 2), np.int32), np.empty((self.pairs, 2), np.int32)),
            *(np.empty((grouped, 5), np.int32), np.empty(grouped, np.int32)),
            np.empty((grouped, PREFIX_LEVELS), np.int32),
        ]

    def fill(self, arrays: Sequence[Array], batch: Batch | None) -> None:
        """Write a batch, or a step without a token, into `arrays` of this shape.

        Padding tokens belong to no sequence, padding sequences have neither query tokens nor context, and what
        padding changes and draws goes where nobody reads it.
        """
        spare_place = self.spare_slot * self.tables[1]
        last = 0 if batch is None else batch.query_start[-1]
        padding = (NOWHERE, 0, 0, last, 0, 0, spare_place, 0, 0, self.spare_slot, 0, 1, 0, 0, 0, -1, 0, 0, -1)
        values = [array[:0] for array in arrays] if batch is None else self._values(batch)
        for array, value, fill in zip(arrays, values, padding, strict=True):
            array[: len(value)] = value
            array[len(value) :] = fill

    def _values(self, batch: Batch) -> list[Array]:
        sampling = batch.sampling
        slots, places, blocks = batch.block_changes
        return [
            *(batch.slot_mapping, batch.positions, batch.token_ids),
            *(batch.query_start, batch.context_lens, batch.slots),
            *(slots.astype(np.int64) * self.tables[1] + places, blocks),
            *(batch.sampled_tokens, batch.sampled_slots),
            *(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p),
            *(position_keys(sampling.row_key, sampling.position), sampling.suppressed[: self.pairs]),
            *_prefix_arrays(batch),
        ]


def _prefix_arrays(batch: Batch) -> list[Array]:
    prefixes = batch.prefixes
    if prefixes is None:
        return [np.empty((0, 5), np.int32), np.empty(0, np.int32), np.empty((0, PREFIX_LEVELS), np.int32)]
    return [prefixes.segments, prefixes.own_start, prefixes.own_segments]


def exact_shape(batch: Batch, tables: tuple[int, int]) -> StepShape:
    """The shape without padding, but that sequences that are not sampled, or samples that part, leave room."""
    return StepShape(
        tokens=len(batch.token_ids),
        sequences=max(len(batch.slots), len(batch.sampled_slots)),
        changes=batch.block_changes.shape[1],
        pairs=len(batch.sampling.suppressed),
        tables=tables,
        grouped=batch.prefixes is not None,
    )
