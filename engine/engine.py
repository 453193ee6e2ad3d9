"""The engine: requests go in, one call computes one step, completions come out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.executor import Drawn, Executor
from engine.prefix_index import PrefixIndex
from engine.request import Completion, FinishReason, Request
from engine.scheduler import Limits, Schedule, Scheduler
from engine.sequence import Sequence, SequenceTable, Slots
from engine.stats import StepStats
from engine.stop_strings import Decode, StopMatcher


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of `Engine.step` brought; `stats` is None if nothing was launched."""

    completions: list[Completion]
    stats: StepStats | None


class Engine:
    """Runs requests in the order they are added, as many at once as the block pool holds.

    `num_blocks` blocks of `block_size` tokens bound what can run; `max_model_len` is lowered to what
    the pool holds, so that any single sequence fits. `decode` turns output ids into text and is needed
    for stop strings only. Not thread-safe.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        end_token_ids: tuple[int, ...] = (),
        decode: Decode | None = None,
    ) -> None:
        limits = Limits(limits.max_seqs, limits.max_batch_tokens, min(limits.max_model_len, num_blocks * block_size))
        self.limits = limits
        self._executor = executor
        self._decode = decode
        self._index = PrefixIndex(num_blocks, block_size)
        self._pool = BlockPool(num_blocks, self._index)
        self._table = SequenceTable(limits.max_seqs, block_size, end_token_ids)
        self._scheduler = Scheduler(self._table, self._pool, self._index, limits, prefix_cache=prefix_cache)
        self._refused: list[Completion] = []
        self._steps = 0

    @property
    def num_running(self) -> int:
        return len(self._table)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.num_running or self.num_waiting or self._refused)

    def add(self, request: Request) -> None:
        """Queue a request; one that can never run comes back from the next step as an error.

        Raises ValueError if it has stop strings and the engine was made without `decode`.
        """
        if problem := self._problem(request):
            self._refused.append(_error(Sequence(request), problem))
            return
        sequence = Sequence(request)
        if request.sampling.stop:
            if self._decode is None:
                raise ValueError("stop strings need a tokenizer to decode the output with")
            sequence.stop_matcher = StopMatcher(self._decode, request.sampling.stop, request.sampling.min_tokens)
        self._scheduler.waiting.append(sequence)

    def step(self) -> StepResult:
        """Compute one step.

        If the executor raises, every running sequence goes back to waiting, nothing unwritten stays
        in the prefix index, and the exception is passed on.
        """
        started, clock, evicted = time.time_ns() // 1000, time.perf_counter_ns(), self._pool.evictions
        schedule = self._scheduler.schedule()
        if schedule is None:
            return StepResult(self._take_refused(), None)
        stats = self._stats_at_launch(schedule, started, self._pool.evictions - evicted)
        try:
            drawn = self._executor.execute(build_batch(self._table, schedule.slots, schedule.counts))
        except BaseException:
            self._scheduler.abandon(schedule)
            raise
        self._scheduler.settle(schedule)
        completions = self._take_refused() + self._advance(schedule, drawn)
        self._steps += 1
        return StepResult(completions, replace(stats, duration_us=(time.perf_counter_ns() - clock) // 1000))

    def cancel(self) -> list[Request]:
        """Drop all requests, running and waiting, and free their blocks; what was dropped, in order."""
        return [sequence.request for sequence in self._scheduler.cancel()]

    def _stats_at_launch(self, schedule: Schedule, started: int, evictions: int) -> StepStats:
        allocated, reserved = self._executor.memory()
        return StepStats(
            step=self._steps,
            started_at=started,
            duration_us=0,
            running=self.num_running,
            waiting=self.num_waiting,
            prefill_tokens=schedule.prefill_tokens,
            decode_tokens=schedule.decode_tokens,
            dropped_tokens=0,
            cached_tokens=schedule.cached_tokens,
            recomputed_tokens=schedule.recomputed_tokens,
            inflight_hit_tokens=schedule.inflight_hit_tokens,
            blocks_total=self._pool.total,
            blocks_live=self._pool.live,
            blocks_cached=self._pool.cached,
            blocks_free=self._pool.free,
            slack_tokens=schedule.slack_tokens,
            evictions=evictions,
            preemptions=schedule.preemptions,
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
        )

    def _problem(self, request: Request) -> str | None:
        """Why a request can never run, or None."""
        length, limit = len(request.token_ids), self.limits.max_model_len - 1
        if not length:
            return "the prompt has no tokens"
        if length > limit:
            return (
                f"the prompt has {length} tokens, and at most {limit} fit "
                f"(max_model_len {self.limits.max_model_len} less one token of output)"
            )
        return None

    def _take_refused(self) -> list[Completion]:
        refused, self._refused = self._refused, []
        return refused

    def _advance(self, schedule: Schedule, drawn: Drawn) -> list[Completion]:
        """Append the drawn tokens and end the sequences that are done."""
        table, slots = self._table, schedule.slots
        sampled = slots[table.num_computed[slots] == table.num_tokens[slots]]
        completions = self._end_failed(sampled[drawn.failed])
        going, token_ids = sampled[~drawn.failed], drawn.token_ids[~drawn.failed]
        table.append_token(going, token_ids)
        stop_at = self._match_stop_strings(going)
        stopped = (table.stop_ids[going] == token_ids[:, None]).any(axis=1) | np.isin(going, list(stop_at))
        ended = stopped | (table.num_tokens[going] >= table.token_limit[going])
        for slot, by_stop in zip(going[ended].tolist(), stopped[ended].tolist(), strict=True):
            reason: FinishReason = "stop" if by_stop else "length"
            completions.append(_completion(self._scheduler.finish(slot), reason, stop_at=stop_at.get(slot)))
        return completions

    def _end_failed(self, slots: Slots) -> list[Completion]:
        """End sequences whose logits are not finite, but for those that get another try."""
        ended = [sequence for slot in slots.tolist() if (sequence := self._scheduler.fail(slot)) is not None]
        return [_error(sequence, f"the logits after token {len(sequence.tokens)} are not finite") for sequence in ended]

    def _match_stop_strings(self, slots: Slots) -> dict[int, int]:
        """Slots whose output now holds a stop string, with the characters before it."""
        found: dict[int, int] = {}
        for slot in slots[self._table.has_stop_strings[slots]].tolist():
            matcher = self._table.sequence(slot).stop_matcher
            if matcher is not None:
                at = matcher.push(int(self._table.tokens[slot, self._table.num_tokens[slot] - 1]))
                if at is not None:
                    found[slot] = at
        return found


def _completion(
    sequence: Sequence, reason: FinishReason, *, stop_at: int | None = None, error: str | None = None
) -> Completion:
    return Completion(
        row_id=sequence.request.row_id,
        sample=sequence.request.sample,
        token_ids=sequence.output,
        finish_reason=reason,
        prompt_tokens=len(sequence.request.token_ids),
        cached_tokens=sequence.cached_tokens or 0,
        error=error,
        stop_at=stop_at,
    )


def _error(sequence: Sequence, problem: str) -> Completion:
    return _completion(sequence, "error", error=f"row {sequence.request.row_id}: {problem}")
