"""One step's work as arrays: what is computed, where it is written, and which tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.prefix_groups import PrefixSegments
from engine.sequence import BlockChanges, SequenceTable, Slots


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling settings of the rows sampled in a step; arrays of [rows] unless said otherwise.

    `row_key` (of seed, row and sample) and `position` (of the token to be drawn, counted from the start of
    the sequence) alone decide the noise. `suppressed` int32 [pairs, 2] lists, in order of rows, the (row,
    token id) that must not be drawn: end and stop tokens of rows below their `min_tokens`.
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    min_p: npt.NDArray[np.float32]
    row_key: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    suppressed: npt.NDArray[np.int32]

    @property
    def filtered(self) -> bool:
        """Whether any row draws from a part of the vocabulary only."""
        return bool(np.any(self.top_p < 1) or np.any(self.top_k > 0) or np.any(self.min_p > 0))


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, sequences with a single query token first.

    `token_ids` int32 [tokens] at `positions` int64 [tokens] are written to `slot_mapping` int64
    [tokens] (block * block_size + offset); a negative id stands for the token that a slot drew last
    (`engine.sequence.unread`). `query_start` int32 [sequences + 1] delimits the sequences, which run in
    `slots` int64 [sequences]; `context_lens` int32 [sequences] counts the keys each sees. Row `slot` of the
    block tables is that sequence's, once `block_changes` are applied. `sampled_tokens` int64 [rows] are the
    indices into the tokens whose successor is drawn, for the slots `sampled_slots` int64 [rows]; several slots draw
    from one token where the samples of a prompt part. `block_copies` int32 [2, copies] are blocks and those that
    get what they hold, before anything is written. `prefixes` says which leading keys decodes have in common.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    slots: Slots
    num_decodes: int
    block_changes: BlockChanges
    sampled_tokens: npt.NDArray[np.int64]
    sampled_slots: Slots
    sampling: SamplingBatch
    block_copies: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((2, 0), np.int32))
    prefixes: PrefixSegments | None = None


def build_batch(
    table: SequenceTable,
    slots: Slots,
    counts: npt.NDArray[np.int64],
    *,
    forks: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    prefixes: PrefixSegments | None = None,
) -> Batch:
    """The batch in which each of `slots` computes its next `counts` tokens.

    `slots` must list single-token sequences first. A sequence is sampled if its last known token is
    computed; the sampled rows keep the order of `slots`, and those of `forks` come last: (slot, slot of a sample
    that parts from it). `copies` are (block, block that gets what it holds). Takes the table's block changes.
    """
    starts = table.num_computed[slots]
    ends = starts + counts
    query_start = np.concatenate(([0], np.cumsum(counts)))
    num_decodes = int(np.count_nonzero(counts == 1))
    if num_decodes == len(slots):
        token_slots, positions = slots, starts
    else:
        within = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
        token_slots, positions = np.repeat(slots, counts), np.repeat(starts, counts) + within
    block, offset = np.divmod(positions, table.block_size)
    sampled = ends == table.num_tokens[slots]
    sampled_tokens, sampled_slots = query_start[1:][sampled] - 1, slots[sampled]
    if forks:
        leaders, samples = np.array(forks, np.int64).T
        by_slot = np.argsort(slots)
        places = by_slot[np.searchsorted(slots, leaders, sorter=by_slot)]
        sampled_tokens = np.concatenate((sampled_tokens, query_start[places + 1] - 1))
        sampled_slots = np.concatenate((sampled_slots, samples))
    return Batch(
        token_ids=table.tokens[token_slots, positions],
        positions=positions,
        slot_mapping=table.blocks[token_slots, block].astype(np.int64) * table.block_size + offset,
        query_start=query_start.astype(np.int32),
        context_lens=ends.astype(np.int32),
        slots=slots,
        num_decodes=num_decodes,
        block_changes=table.take_block_changes(),
        sampled_tokens=sampled_tokens,
        sampled_slots=sampled_slots,
        sampling=_sampling_batch(table, sampled_slots),
        block_copies=np.array(copies, np.int32).reshape(-1, 2).T,
        prefixes=prefixes,
    )


def _sampling_batch(table: SequenceTable, slots: Slots) -> SamplingBatch:
    return SamplingBatch(
        temperature=table.temperature[slots],
        top_p=table.top_p[slots],
        top_k=table.top_k[slots],
        min_p=table.min_p[slots],
        row_key=table.row_key[slots],
        position=table.num_tokens[slots],
        suppressed=_suppressed(table, slots),
    )


def _suppressed(table: SequenceTable, slots: Slots) -> npt.NDArray[np.int32]:
    held = np.flatnonzero(table.num_tokens[slots] < table.min_total[slots])
    stop_ids = table.stop_ids[slots[held]]
    row, column = np.nonzero(stop_ids >= 0)
    return np.stack((held[row], stop_ids[row, column]), axis=1).astype(np.int32)
