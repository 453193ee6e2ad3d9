"""The running sequences as arrays: one slot each, so that a step's host work is array work."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.noise_keys import row_key
from engine.request import Request, Sampling, TokenIds
from engine.stop_strings import StopMatcher

Slots = npt.NDArray[np.int64]
NO_TOKEN = -1  # pads the table of stop ids; no vocabulary has it
BlockChanges = npt.NDArray[np.int32]
"""int32 [3, changes]: slot, place in its block table, block."""


def unread(slots: Slots) -> npt.NDArray[np.int32]:
    """What stands for the token that a slot drew last, while only the device knows it: always negative."""
    return (-1 - slots).astype(np.int32)


@dataclass(slots=True)
class Sequence:
    """One request on its way through the engine, waiting or running.

    `output` holds the tokens generated before a preemption; while the sequence runs they are in the
    table. `computed_before` counts the leading tokens whose K/V this sequence computed or found at
    least once, so that computing them again is known as recomputation. `found_tokens` of them were in
    the prefix cache when it was last admitted. A sequence that runs `alone` shares no blocks; `retry`
    asks for that once it has left its slot.
    """

    request: Request
    output: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    computed_before: int = 0
    cached_tokens: int | None = None  # found at the first admission
    found_tokens: int = 0
    alone: bool = False
    retry: bool = False
    stop_matcher: StopMatcher | None = None

    @property
    def tokens(self) -> TokenIds:
        """Prompt and output, int32; meaningful while the sequence waits."""
        if not len(self.output):
            return self.request.token_ids
        return np.concatenate((self.request.token_ids, self.output))


class SequenceTable:
    """State of up to `max_seqs` running sequences, indexed by slot.

    `tokens` int32 [max_seqs, width] and `blocks` int32 [max_seqs, width / block_size] grow with the
    longest sequence so far. `num_computed` tokens of the `num_tokens` known ones have K/V, or get it in a
    step that is launched. A token that is drawn but not read yet counts as known and is stored as
    `unread(slot)`. A sequence ends by length at `token_limit` tokens, and by a token of its `stop_ids`:
    its own and, unless it ignores them, the model's `end_token_ids`. One that has `ended` keeps its slot
    and its blocks until the launched step that computes it is over.
    """

    def __init__(self, max_seqs: int, block_size: int, end_token_ids: tuple[int, ...] = ()) -> None:
        self.end_token_ids = end_token_ids
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * max_seqs
        self.tokens: npt.NDArray[np.int32] = np.zeros((max_seqs, block_size), np.int32)
        self.blocks: npt.NDArray[np.int32] = np.zeros((max_seqs, 1), np.int32)
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.num_computed: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.prompt_tokens: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.computed_before: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.token_limit: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)
        self.min_total: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)  # no stop below this many tokens
        self.has_stop_strings: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)
        self.stop_ids: npt.NDArray[np.int32] = np.full((max_seqs, 4), NO_TOKEN, np.int32)
        self.temperature: npt.NDArray[np.float32] = np.zeros(max_seqs, np.float32)
        self.top_p: npt.NDArray[np.float32] = np.ones(max_seqs, np.float32)
        self.top_k: npt.NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self.min_p: npt.NDArray[np.float32] = np.zeros(max_seqs, np.float32)
        self.row_key: npt.NDArray[np.uint64] = np.zeros(max_seqs, np.uint64)  # of the noise of its draws
        self.ended: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)
        self.running: Slots = np.empty(0, np.int64)  # in order of admission
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._block_changes: list[BlockChanges] = []

    def __len__(self) -> int:
        return len(self.running)

    def sequence(self, slot: int) -> Sequence:
        """The sequence that runs in `slot`; a free slot is a KeyError."""
        sequence = self.sequences[slot]
        if sequence is None:
            raise KeyError(slot)
        return sequence

    def admit(self, sequence: Sequence, blocks: npt.NDArray[np.int32], computed: int, token_limit: int) -> int:
        """Give a sequence a slot; its first `computed` tokens already have K/V in `blocks`."""
        self._widen(token_limit)
        slot = self._free_slots.pop()
        request, tokens = sequence.request, sequence.tokens
        self.sequences[slot] = sequence
        self.tokens[slot, : len(tokens)] = tokens
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = computed
        self.prompt_tokens[slot] = len(request.token_ids)
        self.computed_before[slot] = sequence.computed_before
        self.token_limit[slot] = token_limit
        self.row_key[slot] = row_key(
            request.sampling.seed, request.row_id if request.draw_id is None else request.draw_id, request.sample
        )
        self._set_sampling(slot, request.sampling)
        self.running = np.append(self.running, slot)
        self._note_blocks(np.full(len(blocks), slot), np.arange(len(blocks)), blocks)
        return slot

    def remove(self, slot: int) -> Sequence:
        """Free a slot and return its sequence, its output taken out of the table."""
        sequence = self.sequence(slot)
        sequence.output = self.output(slot)
        # A token that was dropped has been computed, too, but is none of the sequence.
        computed = min(int(self.num_computed[slot]), int(self.num_tokens[slot]))
        sequence.computed_before = max(sequence.computed_before, computed)
        self.sequences[slot] = None
        self.ended[slot] = False
        self.running = self.running[self.running != slot]
        self._free_slots.append(slot)
        return sequence

    def output(self, slot: int) -> TokenIds:
        """A copy of the tokens generated so far, int32."""
        return self.tokens[slot, self.prompt_tokens[slot] : self.num_tokens[slot]].copy()

    def held_blocks(self, slot: int) -> npt.NDArray[np.int32]:
        """The block table of a slot, as far as it is used; int32, a view."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def append_block(self, slots: Slots, blocks: npt.NDArray[np.int32]) -> None:
        """Append one block to each of `slots`."""
        self.blocks[slots, self.num_blocks[slots]] = blocks
        self._note_blocks(slots, self.num_blocks[slots], blocks)
        self.num_blocks[slots] += 1

    def take_block_changes(self) -> BlockChanges:
        """What was written into the block tables since the last call; no place twice."""
        changes, self._block_changes = self._block_changes, []
        return np.concatenate(changes, axis=1) if changes else np.empty((3, 0), np.int32)

    def growing(self) -> Slots:
        """Running sequences that get another token, in order of admission."""
        return self.running[
            ~self.ended[self.running] & (self.num_tokens[self.running] < self.token_limit[self.running])
        ]

    def append_unread(self, slots: Slots) -> None:
        """Append a token that is drawn in the step being launched to each of `slots`."""
        self.tokens[slots, self.num_tokens[slots]] = unread(slots)
        self.num_tokens[slots] += 1

    def read(self, slots: Slots, positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]) -> None:
        """Put the drawn tokens into the places that were left for them."""
        self.tokens[slots, positions] = token_ids

    def _note_blocks(self, slots: Slots, places: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32]) -> None:
        self._block_changes.append(np.stack((slots, places, blocks)).astype(np.int32))

    def _widen(self, num_tokens: int) -> None:
        """Make room for a sequence of `num_tokens`, at least doubling so that it stays rare."""
        rows, width = self.tokens.shape
        if num_tokens <= width:
            return
        tokens, blocks = self.tokens, self.blocks
        width = max(num_tokens, 2 * width)
        # The system gives memory to zeros as they are written, and most of the new width never is.
        self.tokens = np.zeros((rows, width), np.int32)
        self.blocks = np.zeros((rows, -(-width // self.block_size)), np.int32)
        self.tokens[:, : tokens.shape[1]] = tokens
        self.blocks[:, : blocks.shape[1]] = blocks

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.min_total[slot] = self.prompt_tokens[slot] + sampling.min_tokens
        self.has_stop_strings[slot] = bool(sampling.stop)
        self._set_stop_ids(slot, sampling.stop_token_ids + (() if sampling.ignore_eos else self.end_token_ids))

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
