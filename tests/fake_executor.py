"""A model without weights: its K/V are the tokens themselves, so what it answers proves what it read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from engine.batch import Batch
from engine.engine import Engine
from engine.executor import Drawn
from engine.prefix_index import ROOT, BlockState
from engine.request import Request, Sampling
from engine.scheduler import Limits

VOCAB = 50
END = 0
UNWRITTEN = -7


class FailedStepError(RuntimeError):
    """What the fake executor raises when told to."""


def next_token(context: Sequence[int], draw_id: int, seed: int, vocab: int = VOCAB) -> int:
    """The fake model's token after `context`; the end token once in twelve."""
    value = zlib.crc32(np.array([*context, draw_id, seed], np.int64).tobytes())
    return END if value % 12 == 0 else 1 + value // 12 % (vocab - 1)


def expected_output(request: Request, max_model_len: int, end: int = END, vocab: int = VOCAB) -> list[int]:
    """The output of a request that runs alone on a perfect engine."""
    context = request.token_ids.tolist()
    draw_id = request.row_id if request.draw_id is None else request.draw_id
    limit = min(len(context) + request.sampling.max_tokens, max_model_len)
    output: list[int] = []
    while len(context) < limit and (not output or output[-1] != end):
        token = next_token(context, draw_id, request.sampling.seed, vocab)
        if token == end and len(output) < request.sampling.min_tokens:
            token = end + 1
        output.append(token)
        context.append(token)
    return output


class FakeExecutor:
    """Writes the batch's tokens into paged storage, then reads every sampled context back through its table.

    `fail_steps` raises in those steps, after writing; `poison` lists rows whose logits are not finite.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fail_steps: frozenset[int] = frozenset(),
        poison: frozenset[int] = frozenset(),
        vocab: int = VOCAB,
    ) -> None:
        self._vocab = vocab
        self.storage = np.full(num_blocks * block_size, UNWRITTEN, np.int64)
        self.block_size = block_size
        self.batches: list[Batch] = []
        self._fail_steps = fail_steps
        self._poison = poison

    def execute(self, batch: Batch) -> Drawn:
        assert len(np.unique(batch.slot_mapping)) == len(batch.slot_mapping), "two tokens of a step share a slot"
        self.batches.append(batch)
        self.storage[batch.slot_mapping] = batch.token_ids
        if len(self.batches) - 1 in self._fail_steps:
            self.storage[batch.slot_mapping] = UNWRITTEN
            raise FailedStepError(len(self.batches) - 1)
        counts = np.diff(batch.query_start)
        assert np.all(counts[: batch.num_decodes] == 1)
        assert np.all(counts[batch.num_decodes :] > 1)
        sequences = np.searchsorted(batch.query_start[1:] - 1, batch.sampled_tokens)
        tokens = [self._draw(batch, row, int(sequence)) for row, sequence in enumerate(sequences)]
        failed = np.isin(batch.sampling.draw_id, list(self._poison))
        return Drawn(np.array(tokens, np.int32), failed)

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def _draw(self, batch: Batch, row: int, sequence: int) -> int:
        length = int(batch.context_lens[sequence])
        positions = np.arange(length)
        table = batch.block_tables[sequence].astype(np.int64)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        sampling = batch.sampling
        assert sampling.position[row] == length
        context = self.storage[slots].tolist()
        token = next_token(context, int(sampling.draw_id[row]), int(sampling.seed[row]), self._vocab)
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
) -> tuple[Engine, FakeExecutor]:
    """An engine over a fake executor."""
    executor = FakeExecutor(num_blocks, block_size, fail_steps, poison, vocab)
    engine = Engine(
        executor,
        Limits(max_seqs, max_batch_tokens, max_model_len),
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
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
    for block in pool._cached:
        assert not held[block]
        assert index.state(block) is BlockState.WRITTEN
