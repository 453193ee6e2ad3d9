"""Which tokens are computed next: continuing, admitting and preempting sequences in units of blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.admission import AdmissionRule, make_admission
from engine.block_pool import BlockPool, Blocks
from engine.occupancy_forecast import Newcomer
from engine.output_lengths import NO_GROUP
from engine.prefix_groups import PrefixSegments, prefix_segments
from engine.prefix_index import BlockState, PrefixIndex
from engine.sequence import Sequence, SequenceTable, Slots
from engine.victim import choose_victim

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a sequence may take: sequences, tokens a step, tokens a sequence.

    Raises ValueError where a step could not hold one token of every sequence.
    """

    max_seqs: int
    max_batch_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_seqs <= self.max_batch_tokens:
            raise ValueError(
                f"max_seqs {self.max_seqs} must lie between 1 and max_batch_tokens {self.max_batch_tokens}: "
                "a step computes a token of every running sequence"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len {self.max_model_len} leaves no room for a prompt token and an output token"
            )


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that a step started, and what was known of it before."""

    sequence: Sequence
    cached_tokens: int | None
    computed_before: int


class Fork(NamedTuple):
    """A sample that parts from another one with the step that computes the end of their prompt."""

    leader: int
    slot: int


class BlockCopy(NamedTuple):
    """A block that holds what another one holds, for a sequence that writes into it."""

    source: int
    target: int


@dataclass(slots=True)
class Schedule:
    """One step: the next `counts` tokens of `slots` (single-token sequences first), and what that means."""

    slots: Slots
    counts: Counts
    running: int = 0  # sequences that want another token, whether they get one or not
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    inflight_hit_tokens: int = 0
    slack_tokens: int = 0
    duplicate_blocks: int = 0
    admitted: list[Admitted] = field(default_factory=list)
    filling: list[Blocks] = field(default_factory=list)  # blocks that the step completes
    forks: list[Fork] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)  # to be made before the step writes
    prefixes: PrefixSegments | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a launched step draws: a token at `positions` int64 [rows] of `slots` int64 [rows]."""

    slots: Slots
    positions: npt.NDArray[np.int64]


class Scheduler:
    """Keeps running sequences fed with blocks and admits waiting ones in order.

    There is no prefill or decode phase: every running sequence computes its known but uncomputed
    tokens, one when it decodes and a chunk of its prompt otherwise, under one token budget.
    Preemption takes the sequence that wastes least, before anything of the step is scheduled; a sequence
    whose blocks others count on in this step therefore cannot be preempted in it.

    Steps may be scheduled before the tokens of the ones before are read: they run in order on the device,
    so what a launched step writes counts as written.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: BlockPool,
        index: PrefixIndex,
        limits: Limits,
        *,
        prefix_cache: bool = True,
        group_prefixes: bool = False,
        admission: AdmissionRule = "planned",
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self._table = table
        self._pool = pool
        self._index = index
        self._limits = limits
        self._prefix_cache = prefix_cache
        self._group_prefixes = group_prefixes
        self._admission = make_admission(admission, table, pool.total)
        self._block_size = index.block_size

    def schedule(self, *, may_preempt: bool = True) -> Schedule | None:
        """Plan the next step, taking and giving back blocks for it.

        None if nothing runs or can start, or if a sequence would have to be preempted and may not be: one whose
        token is still on the device.
        """
        preemptions = 0
        growing = self._table.growing()
        while len(short := self._short_of_a_block(growing)) + len(parting := self._parting(growing)) > (
            self._pool.available
        ):
            if not may_preempt:
                return None
            self._give_way(choose_victim(self._table, len(short) + len(parting) - self._pool.available))
            preemptions += 1
            growing = self._table.growing()
        self._table.append_block(short, self._pool.allocate(len(short)))
        copies = self._part(parting)
        self._table.shares_tail[growing] = False
        step = self._continue_running(growing)
        step.preemptions, step.copies = preemptions, copies
        self._account(step, step.slots, step.counts)
        if not preemptions:
            self._admit_waiting(step)
        if not len(step.slots):
            return None
        self._put_decodes_first(step)
        self._fork(step)
        step.running = len(growing) + len(step.admitted) + len(step.forks)
        running = self._table.running
        spare = self._table.num_blocks[running] * self._block_size - self._table.num_tokens[running]
        step.slack_tokens = int(np.maximum(spare, 0).sum())  # the last token of a sequence never takes a slot
        return step

    def launched(self, step: Schedule) -> Drawing:
        """Record that the step is on its way: its K/V count as written, its draws as known but unread."""
        table = self._table
        table.num_computed[step.slots] += step.counts
        slots = np.append(step.slots, [fork.slot for fork in step.forks]).astype(np.int64)
        for blocks in step.filling:
            self._index.mark(blocks, BlockState.FILLING, BlockState.WRITTEN)
        drawing = slots[table.num_computed[slots] == table.num_tokens[slots]]
        positions = table.num_tokens[drawing]
        table.append_unread(drawing)
        return Drawing(drawing, positions)

    def abandon(self, launched: list[tuple[Schedule, Drawing]], scheduled: Schedule | None = None) -> None:
        """Put every running sequence back, as if neither `launched` steps (oldest first) nor the next had happened."""
        table = self._table
        for step, drawing in launched:
            table.num_computed[step.slots] -= step.counts
            table.num_tokens[drawing.slots[~table.ended[drawing.slots]]] -= 1
        steps = [step for step, _ in launched] + ([] if scheduled is None else [scheduled])
        for blocks in (blocks for step in steps for blocks in step.filling):
            self._index.mark(blocks, BlockState.FILLING, BlockState.PENDING)
            self._index.mark(blocks, BlockState.WRITTEN, BlockState.PENDING)
        # Latest first: what follows an unwritten block leaves the index before it.
        for slot in table.running[::-1].tolist():
            if table.ended[slot]:
                self.release(slot)
            else:
                self._preempt(slot)
        for admitted in (admitted for step in reversed(steps) for admitted in step.admitted):
            admitted.sequence.cached_tokens = admitted.cached_tokens  # its hits are counted when it starts again
            admitted.sequence.computed_before = admitted.computed_before
        table.take_block_changes()

    def release(self, slot: int) -> Sequence:
        """Take a sequence out and give back its blocks; one that must run once more goes first in line."""
        held = self._table.held_blocks(slot)
        if len(self._table.sequence(slot).output):  # it was preempted: its generated blocks are indexed
            self._forget_generated(held[self._table.prompt_tokens[slot] // self._block_size :])
        self._pool.release(held)
        sequence = self._table.remove(slot)
        if sequence.retry:
            sequence.retry, sequence.alone = False, True
            self.waiting.appendleft(sequence)
        return sequence

    def record_ends(self, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        """Let admission learn from sequences that end: where `stopped` of their own accord, else at their limit."""
        self._admission.record_ends(slots, stopped)

    def fail(self, slot: int) -> bool:
        """Let nobody find the blocks of a sequence whose K/V cannot be trusted; whether that is its end.

        If it found a part of them, it may have caught what another sequence has: once released it runs again alone.
        """
        self._pool.forget(self._table.held_blocks(slot))
        sequence = self._table.sequence(slot)
        sequence.retry = sequence.found_tokens > 0
        return not sequence.retry

    def cancel(self) -> list[Sequence]:
        """Take out all sequences, none of which is in a launched step; what they generated is not indexed any more.

        Running sequences come first in the result.
        """
        running = [self.release(slot) for slot in self._table.running[::-1].tolist()][::-1]
        waiting = list(self.waiting)
        for sequence in waiting:
            if len(sequence.output):  # it was preempted
                found = self._index.match(sequence.tokens, len(sequence.tokens) // self._block_size)
                self._pool.forget(found[len(sequence.request.token_ids) // self._block_size :])
        self.waiting.clear()
        self._pool.drop_plans()
        return running + waiting

    def _parting(self, growing: Slots) -> list[int]:
        """Samples that write into a block which they still share; the last one of each block keeps it."""
        parting: list[int] = []
        holders: dict[int, int] = {}
        for slot in growing[self._table.shares_tail[growing]].tolist():
            tail = int(self._table.held_blocks(slot)[-1])
            left = holders.get(tail, self._pool.references(tail))
            holders[tail] = left - 1
            if left > 1:
                parting.append(slot)
        return parting

    def _part(self, parting: list[int]) -> list[BlockCopy]:
        """Give each of `parting` a block of its own for its last tokens."""
        targets = self._pool.allocate(len(parting)).tolist()
        sources = [self._table.replace_tail(slot, block) for slot, block in zip(parting, targets, strict=True)]
        for source in sources:
            self._pool.release(np.array([source], np.int32))
        return [BlockCopy(source, target) for source, target in zip(sources, targets, strict=True)]

    def _fork(self, step: Schedule) -> None:
        """Give the samples of prompts that the step computes to their ends slots of their own."""
        if not self._table.forks:
            return
        ends = self._table.num_computed[step.slots] + step.counts == self._table.num_tokens[step.slots]
        for leader in step.slots[ends].tolist():
            for _ in range(self._table.sequence(leader).forks):
                slot = self._table.fork(leader)
                self._pool.acquire(self._table.held_blocks(slot))
                step.forks.append(Fork(leader, slot))

    def _short_of_a_block(self, growing: Slots) -> Slots:
        return growing[self._table.num_tokens[growing] > self._table.num_blocks[growing] * self._block_size]

    def _give_way(self, slot: int) -> None:
        self._table.sequence(slot).preemptions += 1
        self._preempt(slot)

    def _preempt(self, slot: int) -> None:
        """Take a running sequence's blocks; it goes first in line and computes again what is not cached by then."""
        table = self._table
        held = table.held_blocks(slot)
        shares = self._prefix_cache and not table.sequence(slot).alone
        if shares:
            self._index_generated(slot, held)
        self._pool.release(held, returning=shares)
        self.waiting.appendleft(table.remove(slot))

    def _index_generated(self, slot: int, held: Blocks) -> None:
        """Let the sequence find what it generated, unless another block stands for part of its prompt."""
        start = int(self._table.prompt_tokens[slot]) // self._block_size
        if start and self._index.state(int(held[start - 1])) is BlockState.UNINDEXED:
            return
        end = int(self._table.num_computed[slot]) // self._block_size
        self._index.insert(self._table.tokens[slot], held, start, end, BlockState.WRITTEN)

    def _forget_generated(self, generated: Blocks) -> None:
        for block in generated[::-1].tolist():
            if self._pool.references(block) == 1 and self._index.is_leaf(block):
                self._index.remove(block)

    def _continue_running(self, growing: Slots) -> Schedule:
        """One token for each decoding sequence, then prompt chunks in order of admission while tokens are left."""
        counts = self._table.num_tokens[growing] - self._table.num_computed[growing]
        budget = self._limits.max_batch_tokens - int(np.count_nonzero(counts == 1))
        for position in np.flatnonzero(counts > 1):
            counts[position] = min(int(counts[position]), budget)
            budget -= int(counts[position])
        scheduled = counts > 0
        slots, counts = growing[scheduled], counts[scheduled]
        step = Schedule(slots, counts)
        in_prompt = self._table.num_computed[slots] < self._table.prompt_tokens[slots]
        for slot, count in zip(slots[in_prompt].tolist(), counts[in_prompt].tolist(), strict=True):
            self._mark_filling(step, slot, count)
        return step

    def _admit_waiting(self, step: Schedule) -> None:
        self._admission.begin_step()
        budget = self._limits.max_batch_tokens - int(step.counts.sum())
        slots: list[int] = []
        counts: list[int] = []
        while self.waiting and budget and self._slots_left > self.waiting[0].forks:
            slot = self._try_admit(self.waiting[0], step)
            if slot is None:
                break
            self.waiting.popleft()
            count = min(int(self._table.num_tokens[slot] - self._table.num_computed[slot]), budget)
            self._mark_filling(step, slot, count)
            slots.append(slot)
            counts.append(count)
            budget -= count
        admitted, admitted_counts = np.array(slots, np.int64), np.array(counts, np.int64)
        self._account(step, admitted, admitted_counts)
        step.slots = np.concatenate((step.slots, admitted))
        step.counts = np.concatenate((step.counts, admitted_counts))

    @property
    def _slots_left(self) -> int:
        """Slots that neither a running sequence has nor a sample that is about to part from one."""
        return self._limits.max_seqs - len(self._table) - self._table.forks

    def _try_admit(self, sequence: Sequence, step: Schedule) -> int | None:
        """Start a sequence if its blocks are there; its slot, or None if it must wait."""
        tokens, size = sequence.tokens, self._block_size
        shares = self._prefix_cache and not sequence.alone
        # At least one token is computed, so that there is something to sample from.
        matched = self._index.match(tokens, (len(tokens) - 1) // size) if shares else []
        if self._index.in_state(matched, BlockState.PENDING):
            return None  # another sequence is about to fill this block: share it then
        needed, unheld = -(-len(tokens) // size) - len(matched), self._pool.unreferenced(matched)
        prompt = len(sequence.request.token_ids)
        newcomer = Newcomer(
            tokens=len(tokens),
            prompt=prompt,
            limit=min(prompt + sequence.request.sampling.max_tokens, self._limits.max_model_len),
            shared=len(matched) - unheld,
            needed=needed + unheld,
            available=self._pool.available,
            samples=1 + sequence.forks,
            group=NO_GROUP if sequence.request.group is None else sequence.request.group,
        )
        if not self._admission.admits(newcomer):
            return None
        self._pool.acquire(matched)
        blocks = np.concatenate((np.array(matched, np.int32), self._pool.allocate(needed)))
        self._count_hits(sequence, matched, step)
        slot = self._table.admit(sequence, blocks, len(matched) * size, newcomer.limit)
        if shares:
            self._index.insert(tokens, blocks, len(matched), prompt // size, BlockState.PENDING)
            self._pool.plan(blocks[: prompt // size], sequence.ordinal, sequence.request.reuse)
        return slot

    def _count_hits(self, sequence: Sequence, matched: list[int], step: Schedule) -> None:
        """Count prompt tokens that are in the cache and were never computed for this sequence before."""
        found = len(matched) * self._block_size
        new = max(0, min(found, len(sequence.request.token_ids)) - sequence.computed_before)
        filling = self._index.in_state(matched, BlockState.FILLING) * self._block_size
        step.admitted.append(Admitted(sequence, sequence.cached_tokens, sequence.computed_before))
        step.cached_tokens += new
        step.inflight_hit_tokens += min(new, filling)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found
        sequence.found_tokens = found
        sequence.computed_before = max(sequence.computed_before, found)

    def _mark_filling(self, step: Schedule, slot: int, count: int) -> None:
        """Note the blocks that the next `count` tokens of a sequence complete."""
        start = int(self._table.num_computed[slot])
        first, end = start // self._block_size, (start + count) // self._block_size
        blocks = self._table.blocks[slot, first:end]
        self._index.mark(blocks, BlockState.PENDING, BlockState.FILLING)
        step.filling.append(blocks)
        if self._prefix_cache:
            in_prompt = blocks[: max(0, int(self._table.prompt_tokens[slot]) // self._block_size - first)]
            step.duplicate_blocks += self._index.in_state(in_prompt, BlockState.UNINDEXED)

    def _account(self, step: Schedule, slots: Slots, counts: Counts) -> None:
        """Split the tokens of `slots` into prefill, of it recomputed, and decode."""
        start = self._table.num_computed[slots]
        end = start + counts
        before = self._table.computed_before[slots]
        prefill_end = np.maximum(self._table.prompt_tokens[slots], before)
        prefill = int(np.maximum(np.minimum(end, prefill_end) - start, 0).sum())
        step.prefill_tokens += prefill
        step.recomputed_tokens += int(np.maximum(np.minimum(end, before) - start, 0).sum())
        step.decode_tokens += int(counts.sum()) - prefill

    def _put_decodes_first(self, step: Schedule) -> None:
        """Single tokens before chunks, and those that share a prefix side by side."""
        single = step.counts == 1
        decodes, chunks = step.slots[single], step.slots[~single]
        if self._group_prefixes:
            context = self._table.num_computed + 1
            grouped = prefix_segments(self._table.prefix_order, decodes, context, self._block_size)
            if grouped is not None:
                decodes, step.prefixes = grouped
        step.slots = np.concatenate((decodes, chunks))
        step.counts = np.concatenate((np.ones(len(decodes), np.int64), step.counts[~single]))
