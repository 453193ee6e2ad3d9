"""A model without weights: its K/V are the tokens themselves, so what it answers proves what it read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from engine.admission import AdmissionRule
from engine.batch import Batch
from engine.engine import Engine
from engine.executor import Drawn
from engine.noise_keys import row_key
from engine.prefix_index import ROOT, BlockState
from engine.request import Request, Sampling
from engine.scheduler import Limits

VOCAB = 50
END = 0
UNWRITTEN = -7
MAX_SLOTS = 64


class FailedStepError(RuntimeError):
    """What the fake executor raises when told to."""


def next_token(context: Sequence[int], row: int, vocab: int = VOCAB) -> int:
    """The fake model's token after `context` for a row key; the end token once in twelve."""
    value = zlib.crc32(np.array(context, np.int64).tobytes(), row % 2**32)
    return END if value % 12 == 0 else 1 + value // 12 % (vocab - 1)


def key_of(request: Request) -> int:
    """The row key that the noise of a request's draws comes from."""
    draw_id = request.row_id if request.draw_id is None else request.draw_id
    return int(row_key(request.sampling.seed, draw_id, request.sample))


def expected_output(request: Request, max_model_len: int, end: int = END, vocab: int = VOCAB) -> list[int]:
    """The output of a request that runs alone on a perfect engine."""
    context = request.token_ids.tolist()
    limit = min(len(context) + min(request.sampling.max_tokens, request.stop_after or max_model_len), max_model_len)
    output: list[int] = []
    while len(context) < limit and (not output or output[-1] != end):
        token = next_token(context, key_of(request), vocab)
        if token == end and len(output) < request.sampling.min_tokens:
            token = end + 1
        output.append(token)
        context.append(token)
    return output


class FakeStep:
    """A launched step. It is computed when it is launched, as on a device, and read later."""

    def __init__(self, drawn: Drawn, failure: FailedStepError | None) -> None:
        self._drawn, self._failure = drawn, failure
        self.read = False

    def wait(self) -> Drawn:
        assert self._failure is not None or not self.read, "a step is read twice"
        self.read = True
        if self._failure is not None:
            raise self._failure
        return self._drawn


class FakeExecutor:
    """Writes the batch's tokens into paged storage, then reads every sampled context back through its table.

    It keeps block tables and last tokens as a device does. `fail_steps` raise: the even ones when they are
    launched, after writing, the odd ones when they are read. `poison` lists the row keys whose logits are not
    finite. At most `depth` launched steps may be unread when another is launched.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fail_steps: frozenset[int] = frozenset(),
        poison: frozenset[int] = frozenset(),
        vocab: int = VOCAB,
        depth: int = 0,
    ) -> None:
        self._vocab = vocab
        self.storage = np.full(num_blocks * block_size, UNWRITTEN, np.int64)
        self.block_size = block_size
        self.batches: list[Batch] = []
        self._tables = np.full((MAX_SLOTS, num_blocks + 1), UNWRITTEN, np.int64)
        self._last_tokens = np.full(MAX_SLOTS, UNWRITTEN, np.int64)
        self._fail_steps = fail_steps
        self._poison = poison
        self._depth = depth
        self._steps: list[FakeStep] = []

    def launch(self, batch: Batch) -> FakeStep:
        unread = [step for step in self._steps if not step.read]
        assert len(unread) <= self._depth, "too many steps are launched and not read"
        number = len(self.batches)
        self.batches.append(batch)
        self._change_tables(batch)
        self._copy_blocks(batch)
        tokens = np.where(batch.token_ids < 0, self._last_tokens[-1 - batch.token_ids], batch.token_ids)
        assert np.all(tokens >= 0)
        assert len(np.unique(batch.slot_mapping)) == len(batch.slot_mapping), "two tokens of a step share a slot"
        self.storage[batch.slot_mapping] = tokens
        if number in self._fail_steps and number % 2 == 0:
            self.storage[batch.slot_mapping] = UNWRITTEN
            raise FailedStepError(number)
        counts = np.diff(batch.query_start)
        assert np.all(counts[: batch.num_decodes] == 1)
        assert np.all(counts[batch.num_decodes :] > 1)
        sequences = np.searchsorted(batch.query_start[1:] - 1, batch.sampled_tokens)
        own = np.isin(batch.sampled_slots, batch.slots)
        assert np.array_equal(batch.slots[sequences[own]], batch.sampled_slots[own])
        for leader, sample in zip(batch.slots[sequences[~own]], batch.sampled_slots[~own], strict=True):
            held = -(-int(batch.context_lens[batch.slots == leader][0]) // self.block_size)
            assert np.array_equal(self._tables[leader, :held], self._tables[sample, :held]), "a sample has other blocks"
        self._check_prefixes(batch)
        drawn = np.array([self._draw(batch, row, int(at)) for row, at in enumerate(sequences)], np.int32)
        self._last_tokens[batch.sampled_slots] = drawn
        failed = np.isin(batch.sampling.row_key, np.array(list(self._poison), np.uint64))
        failure = FailedStepError(number) if number in self._fail_steps else None
        self._steps.append(FakeStep(Drawn(drawn, failed), failure))
        return self._steps[-1]

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def _change_tables(self, batch: Batch) -> None:
        slots, places, blocks = batch.block_changes
        assert len(set(zip(slots.tolist(), places.tolist(), strict=True))) == len(slots), "a place changes twice"
        self._tables[slots, places] = blocks

    def _copy_blocks(self, batch: Batch) -> None:
        blocks = self.storage.reshape(-1, self.block_size)
        sources, targets = batch.block_copies
        assert len(np.unique(targets)) == len(targets)
        assert not np.isin(targets, sources).any()
        blocks[targets] = blocks[sources]

    def _check_prefixes(self, batch: Batch) -> None:
        """What decodes are said to share, their block tables must name alike, and each leave itself a key."""
        if (prefixes := batch.prefixes) is None:
            return
        size, covered = self.block_size, np.zeros(batch.num_decodes, int)
        for at, (slot, first, members, begin, end) in enumerate(prefixes.segments.tolist()):
            assert members > 1
            assert begin < end
            mine = slice(first, first + members)
            assert np.all(covered[mine] == begin)
            assert np.all((prefixes.own_segments[mine] == at).sum(axis=1) == 1)
            tables = self._tables[batch.slots[mine], begin // size : end // size]
            assert np.all(tables == self._tables[slot, begin // size : end // size])
            covered[mine] = end
        assert np.array_equal(covered, prefixes.own_start)
        assert np.all(covered < batch.context_lens[: batch.num_decodes])
        assert np.array_equal((prefixes.own_segments >= 0).sum(), prefixes.segments[:, 2].sum())

    def _draw(self, batch: Batch, row: int, sequence: int) -> int:
        length = int(batch.context_lens[sequence])
        positions = np.arange(length)
        table = self._tables[batch.slots[sequence]]
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        sampling = batch.sampling
        assert sampling.position[row] == length
        token = next_token(self.storage[slots].tolist(), int(sampling.row_key[row]), self._vocab)
        if [row, token] in batch.sampling.suppressed.tolist():
            token += 1
        return token


def make_engine(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_seqs: int = 8,
    max_batch_tokens: int = 32,
    max_model_len: int = 1000,
    prefix_cache: bool = True,
    fail_steps: frozenset[int] = frozenset(),
    poison: frozenset[int] = frozenset(),
    vocab: int = VOCAB,
    async_steps: bool = False,
    group_prefixes: bool = True,
    admission: AdmissionRule = "planned",
) -> tuple[Engine, FakeExecutor]:
    """An engine over a fake executor."""
    executor = FakeExecutor(num_blocks, block_size, fail_steps, poison, vocab, depth=int(async_steps))
    engine = Engine(
        executor,
        Limits(max_seqs, max_batch_tokens, max_model_len),
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
        group_prefixes=group_prefixes,
        async_steps=async_steps,
        admission=admission,
        end_token_ids=(END,),
    )
    return engine, executor


def request(row_id: int, tokens: Sequence[int], **sampling: int) -> Request:
    """A request of plain token ids."""
    return Request(row_id, np.array(tokens, np.int32), Sampling(**sampling))  # type: ignore[arg-type]


def check_invariants(engine: Engine) -> None:
    """Assert between steps what must hold of blocks, references and the prefix index."""
    pool, index, table = engine._pool, engine._index, engine._table
    pool.check()
    assert pool.live + pool.cached + pool.free == pool.total
    held = np.zeros(pool.total, int)
    for slot in table.running:
        blocks = table.held_blocks(slot)
        assert len(set(blocks.tolist())) == len(blocks)
        assert len(blocks) * index.block_size >= table.num_tokens[slot] - 1
        held[blocks] += 1
    assert held.tolist() == [pool.references(block) for block in range(pool.total)]
    pending = {
        block
        for slot in table.running
        for block in table.held_blocks(slot)[table.num_computed[slot] // index.block_size :].tolist()
    }
    for block in range(pool.total):
        state = index.state(block)
        assert state is not BlockState.FILLING, "a step is over, and a block of it is still being filled"
        if state is BlockState.PENDING:
            assert block in pending
        if state is not BlockState.UNINDEXED and (parent := index.parent(block)) != ROOT:
            assert index.state(parent) is not BlockState.UNINDEXED
            if state is BlockState.WRITTEN:
                assert index.state(parent) is BlockState.WRITTEN
    free = set(pool._free[: pool.free].tolist())
    assert len(free) == pool.free, "a block was freed twice"
    for block in free:
        assert not held[block]
        assert index.state(block) is BlockState.UNINDEXED
    for block in pool._cached.blocks.tolist():
        assert not held[block]
        assert index.state(block) is BlockState.WRITTEN
