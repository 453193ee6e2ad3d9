"""The running sequences as arrays: one slot each, so that a step's host work is array work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.noise_keys import row_key
from engine.output_lengths import NO_GROUP
from engine.prefix_groups import PrefixOrder
from engine.request import Request, Sampling, TokenIds
from engine.stop_strings import StopMatcher

Slots = npt.NDArray[np.int64]
NEVER = 1 << 62  # more tokens than any sequence has
NO_TOKEN = -1  # pads the table of stop ids; no vocabulary has it
NO_OUTPUT: TokenIds = np.empty(0, np.int32)  # one for all that wait
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
    asks for that once it has left its slot. `forks` further samples part from it once its prompt is computed.
    `ordinal` counts the requests that were added before it, `preemptions` how often it gave way.
    """

    request: Request
    ordinal: int = 0
    forks: int = 0
    output: TokenIds = field(default_factory=lambda: NO_OUTPUT)
    computed_before: int = 0
    cached_tokens: int | None = None  # found at the first admission
    found_tokens: int = 0
    alone: bool = False
    retry: bool = False
    preemptions: int = 0
    stop_matcher: StopMatcher | None = None

    @property
    def tokens(self) -> TokenIds:
        """Prompt and output, int32; meaningful while the sequence waits."""
        if not len(self.output):
            return self.request.token_ids
        return np.concatenate((self.request.token_ids, self.output))

    def fork(self) -> Sequence:
        """The last sample that has not parted yet, with the prompt computed."""
        prompt = len(self.request.token_ids)
        sample = replace(self.request, sample=self.request.sample + self.forks, samples=1)
        self.forks -= 1
        if not self.forks:
            self.request = replace(self.request, samples=1)
        return Sequence(
            sample,
            self.ordinal,
            computed_before=prompt,
            cached_tokens=self.cached_tokens,
            found_tokens=prompt,
            alone=self.alone,
            stop_matcher=None if self.stop_matcher is None else self.stop_matcher.fresh(),
        )


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
        self.stop_total: npt.NDArray[np.int64] = np.full(max_seqs, NEVER, np.int64)  # a stop at so many tokens
        self.group: npt.NDArray[np.int64] = np.full(max_seqs, NO_GROUP, np.int64)
        self.parting: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)  # samples that have no slot yet
        self.preempted: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)  # how often so far
        self.has_stop_strings: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)
        self.stop_ids: npt.NDArray[np.int32] = np.full((max_seqs, 4), NO_TOKEN, np.int32)
        self.temperature: npt.NDArray[np.float32] = np.zeros(max_seqs, np.float32)
        self.top_p: npt.NDArray[np.float32] = np.ones(max_seqs, np.float32)
        self.top_k: npt.NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self.min_p: npt.NDArray[np.float32] = np.zeros(max_seqs, np.float32)
        self.row_key: npt.NDArray[np.uint64] = np.zeros(max_seqs, np.uint64)  # of the noise of its draws
        self.ended: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)
        self.shares_tail: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)  # its last block may be another's, too
        self.running: Slots = np.empty(0, np.int64)  # in order of admission
        self.prefix_order = PrefixOrder(max_seqs)
        self.forks = 0  # samples of running sequences that get a slot once their prompt is computed
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
        self.row_key[slot] = _row_key(request)
        self.stop_total[slot] = NEVER if request.stop_after is None else len(request.token_ids) + request.stop_after
        self.group[slot] = NO_GROUP if request.group is None else request.group
        self.preempted[slot] = sequence.preemptions
        self._set_sampling(slot, request.sampling)
        self.forks += sequence.forks
        self.parting[slot] = sequence.forks
        self.prefix_order.insert(slot, blocks, computed // self.block_size, self.blocks)
        self.running = np.append(self.running, slot)
        self._note_blocks(np.full(len(blocks), slot), np.arange(len(blocks)), blocks)
        return slot

    def fork(self, slot: int) -> int:
        """A slot for another sample of the prompt in `slot`, which is computed in full, over the same blocks."""
        self.forks -= 1
        self.parting[slot] -= 1
        sequence = self.sequence(slot).fork()
        new = self._free_slots.pop()
        prompt, held = int(self.prompt_tokens[slot]), self.held_blocks(slot)
        self.sequences[new] = sequence
        self.tokens[new, :prompt] = self.tokens[slot, :prompt]
        self.blocks[new, : len(held)] = held
        for state in (self.num_blocks, self.prompt_tokens, self.token_limit, self.stop_ids, self.min_total):
            state[new] = state[slot]
        self.stop_total[new], self.group[new] = self.stop_total[slot], self.group[slot]
        self.preempted[new] = self.preempted[slot]
        for setting in (self.has_stop_strings, self.temperature, self.top_p, self.top_k, self.min_p):
            setting[new] = setting[slot]
        self.num_tokens[new] = self.num_computed[new] = self.computed_before[new] = prompt
        self.row_key[new] = _row_key(sequence.request)
        self.shares_tail[[slot, new]] = prompt % self.block_size > 0
        self.prefix_order.insert_after(slot, new, prompt // self.block_size)
        self.running = np.append(self.running, new)
        self._note_blocks(np.full(len(held), new), np.arange(len(held)), held)
        return new

    def remove(self, slot: int) -> Sequence:
        """Free a slot and return its sequence, its output taken out of the table."""
        sequence = self.sequence(slot)
        sequence.output = self.output(slot)
        # A token that was dropped has been computed, too, but is none of the sequence.
        computed = min(int(self.num_computed[slot]), int(self.num_tokens[slot]))
        sequence.computed_before = max(sequence.computed_before, computed)
        self.sequences[slot] = None
        self.ended[slot] = self.shares_tail[slot] = False
        self.forks -= sequence.forks
        self.parting[slot] = 0
        self.prefix_order.remove(slot)
        self.running = self.running[self.running != slot]
        self._free_slots.append(slot)
        return sequence

    def output(self, slot: int) -> TokenIds:
        """A copy of the tokens generated so far, int32."""
        return self.tokens[slot, self.prompt_tokens[slot] : self.num_tokens[slot]].copy()

    def held_blocks(self, slot: int) -> npt.NDArray[np.int32]:
        """The block table of a slot, as far as it is used; int32, a view."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def own_blocks(self) -> npt.NDArray[np.int64]:
        """How many full or partial blocks no other sequence holds, by slot; int64 [max_seqs]."""
        own = np.zeros(len(self.sequences), np.int64)
        slots, shared = self.prefix_order.slots, self.prefix_order.shared
        own[slots] = self.num_blocks[slots] - np.maximum(shared, np.append(shared[1:], 0)[: len(shared)])
        return own

    def append_block(self, slots: Slots, blocks: npt.NDArray[np.int32]) -> None:
        """Append one block to each of `slots`."""
        self.blocks[slots, self.num_blocks[slots]] = blocks
        self._note_blocks(slots, self.num_blocks[slots], blocks)
        self.num_blocks[slots] += 1

    def replace_tail(self, slot: int, block: int) -> int:
        """Let `block` hold the last tokens of a sequence; the block that held them."""
        place = self.num_blocks[slot] - 1
        before = int(self.blocks[slot, place])
        self.blocks[slot, place] = block
        self._note_blocks(np.array([slot]), np.array([place]), np.array([block], np.int32))
        return before

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


def _row_key(request: Request) -> int:
    """The key of the noise of a request's draws."""
    name = request.row_id if request.draw_id is None else request.draw_id
    return int(row_key(request.sampling.seed, name, request.sample))
