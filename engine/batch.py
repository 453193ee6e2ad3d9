"""One step's work as arrays: what is computed, where it is written, and which tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sequence import SequenceTable, Slots


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling settings of the rows sampled in a step; arrays of [rows] unless said otherwise.

    `seed`, `draw_id`, `sample` and `position` (of the token to be drawn, counted from the start of the
    sequence) alone decide the noise. `suppressed` int64 [pairs, 2] lists (row, token id) that must not
    be drawn: end and stop tokens of rows below their `min_tokens`.
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.int64]
    draw_id: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    suppressed: npt.NDArray[np.int64]

    def take(self, rows: slice) -> SamplingBatch:
        """The settings of a contiguous range of rows, `suppressed` renumbered to it."""
        inside = (self.suppressed[:, 0] >= rows.start) & (self.suppressed[:, 0] < rows.stop)
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            draw_id=self.draw_id[rows],
            sample=self.sample[rows],
            position=self.position[rows],
            suppressed=self.suppressed[inside] - (rows.start, 0),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, sequences with a single query token first.

    `token_ids` int32 [tokens] at `positions` int64 [tokens] are written to `slot_mapping` int64
    [tokens] (block * block_size + offset). `query_start` int32 [sequences + 1] delimits the sequences,
    `context_lens` int32 [sequences] counts the keys each sees, `block_tables` int32 [sequences, width].
    `sampled_tokens` int64 [rows] are the indices into the tokens whose successor is drawn.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    num_decodes: int
    sampled_tokens: npt.NDArray[np.int64]
    sampling: SamplingBatch


def build_batch(table: SequenceTable, slots: Slots, counts: npt.NDArray[np.int64]) -> Batch:
    """The batch in which each of `slots` computes its next `counts` tokens.

    `slots` must list single-token sequences first. A sequence is sampled if its last known token is
    computed; the sampled rows keep the order of `slots`.
    """
    starts = table.num_computed[slots]
    ends = starts + counts
    query_start = np.concatenate(([0], np.cumsum(counts)))
    within = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    token_slots = np.repeat(slots, counts)
    positions = np.repeat(starts, counts) + within
    block, offset = np.divmod(positions, table.block_size)
    width = -(-int(ends.max()) // table.block_size)
    sampled = ends == table.num_tokens[slots]
    return Batch(
        token_ids=table.tokens[token_slots, positions],
        positions=positions,
        slot_mapping=table.blocks[token_slots, block].astype(np.int64) * table.block_size + offset,
        query_start=query_start.astype(np.int32),
        context_lens=ends.astype(np.int32),
        block_tables=table.blocks[slots, :width],
        num_decodes=int(np.count_nonzero(counts == 1)),
        sampled_tokens=query_start[1:][sampled] - 1,
        sampling=_sampling_batch(table, slots[sampled]),
    )


def _sampling_batch(table: SequenceTable, slots: Slots) -> SamplingBatch:
    return SamplingBatch(
        temperature=table.temperature[slots],
        top_p=table.top_p[slots],
        top_k=table.top_k[slots],
        min_p=table.min_p[slots],
        seed=table.seed[slots],
        draw_id=table.draw_id[slots],
        sample=table.sample[slots],
        position=table.num_tokens[slots],
        suppressed=_suppressed(table, slots),
    )


def _suppressed(table: SequenceTable, slots: Slots) -> npt.NDArray[np.int64]:
    held = np.flatnonzero(table.num_tokens[slots] < table.min_total[slots])
    stop_ids = table.stop_ids[slots[held]]
    row, column = np.nonzero(stop_ids >= 0)
    return np.stack((held[row], stop_ids[row, column].astype(np.int64)), axis=1)
