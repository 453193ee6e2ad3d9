"""The engine: requests go in, one call computes one step, completions come out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from engine.admission import AdmissionRule
from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.executor import DeviceOutOfMemoryError, Drawn, Executor, LaunchedStep
from engine.prefix_index import PrefixIndex
from engine.request import Completion, FinishReason, Request, TokenIds
from engine.scheduler import Drawing, Limits, Schedule, Scheduler
from engine.sequence import Sequence, SequenceTable, Slots
from engine.stats import StepStats
from engine.stop_strings import Decode, StopMatcher


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of `Engine.step` brought.

    `stats` are those of the step whose tokens it read, None if it read none. `host_us` are the
    microseconds the call took, less those it waited for the device.
    """

    completions: list[Completion]
    stats: StepStats | None
    host_us: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way: what was scheduled, what it draws, its statistics so far, and its result to come."""

    schedule: Schedule
    drawing: Drawing
    stats: StepStats
    step: LaunchedStep


class Engine:
    """Runs requests in the order they are added, as many at once as the block pool holds.

    `num_blocks` blocks of `block_size` tokens bound what can run; `max_model_len` is lowered to what
    the pool holds, so that any single sequence fits. `decode` turns output ids into text and is needed
    for stop strings only. With `async_steps`, a step is launched before the tokens of the one before it
    are read; a sequence that turns out to have ended drops the token computed past its end. `admission` is "planned"
    (as many run as the pool is expected to hold until they end), "greedy" (as many as it holds now, less a watermark)
    or "reserve" (as many as it holds at their greatest lengths). `smaller_pool` is
    called once if the device runs out of memory: it gives up the executor's blocks and makes another one with fewer
    blocks, whose number it returns, too. Not thread-safe.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        group_prefixes: bool = False,
        async_steps: bool = False,
        admission: AdmissionRule = "planned",
        end_token_ids: tuple[int, ...] = (),
        decode: Decode | None = None,
        smaller_pool: Callable[[], tuple[Executor, int]] | None = None,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._decode = decode
        self._block_size = block_size
        self._end_token_ids = end_token_ids
        self._make_scheduler = partial(
            Scheduler, prefix_cache=prefix_cache, group_prefixes=group_prefixes, admission=admission
        )
        self._smaller_pool = smaller_pool
        self._make_pool(num_blocks)
        self._refused: list[Completion] = []
        self._depth = 1 if async_steps else 0  # steps that stay unread between two calls
        self._launched: deque[_Launched] = deque()
        self._added = 0  # requests
        self._steps = 0
        self._last_read_us = 0

    @property
    def num_running(self) -> int:
        return len(self._table)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.num_running or self.num_waiting or self._refused or self._launched)

    def add(self, request: Request) -> None:
        """Queue a request; one that can never run comes back from the next step as an error for each sample.

        Raises ValueError if it has stop strings and the engine was made without `decode`.
        """
        sequence = Sequence(request, self._added, forks=request.samples - 1)
        self._added += 1
        if problem := self._problem(request):
            self._refused += [_error(each, each.output, problem) for each in _every_sample(sequence)]
            return
        if request.sampling.stop:
            if self._decode is None:
                raise ValueError("stop strings need a tokenizer to decode the output with")
            sequence.stop_matcher = StopMatcher(self._decode, request.sampling.stop, request.sampling.min_tokens)
        self._scheduler.waiting.append(sequence)

    def step(self) -> StepResult:
        """Launch a step and read the tokens of one.

        If the executor raises, every running sequence goes back to waiting, nothing unwritten stays
        in the prefix index, and the exception is passed on. The first time that the device is out of memory, the
        step happens with a smaller block pool instead, if the engine was told how to make one.
        """
        with suppress(DeviceOutOfMemoryError) if self._smaller_pool is not None else nullcontext():
            return self._step()
        # The exception is gone, and with it what its frames held on the device.
        self._shrink_pool()
        return self._step()

    def _step(self) -> StepResult:
        begin, waited = time.perf_counter_ns(), 0
        launched = self._launch()
        completions: list[Completion] = []
        stats = None
        if self._launched and (len(self._launched) > self._depth or not launched):
            drawn, waited = self._wait()
            completions, stats = self._read(self._launched.popleft(), drawn)
        refused, self._refused = self._refused, []
        return StepResult(refused + completions, stats, (time.perf_counter_ns() - begin - waited) // 1000)

    def _make_pool(self, num_blocks: int) -> None:
        """Begin with `num_blocks` free blocks and nothing that waits or runs."""
        size, limits = self._block_size, self.limits
        limits = Limits(limits.max_seqs, limits.max_batch_tokens, min(limits.max_model_len, num_blocks * size))
        self.limits = limits
        self._index = PrefixIndex(num_blocks, size)
        self._pool = BlockPool(num_blocks, self._index)
        self._table = SequenceTable(limits.max_seqs, size, self._end_token_ids)
        self._scheduler = self._make_scheduler(self._table, self._pool, self._index, limits)

    def _shrink_pool(self) -> None:
        """Go on with a smaller pool, in which nothing is cached; rows too long for it become errors."""
        assert self._smaller_pool is not None
        waiting = self._scheduler.waiting
        self._executor, num_blocks = self._smaller_pool()
        self._smaller_pool = None
        self._make_pool(num_blocks)
        for sequence in waiting:
            if problem := self._problem(sequence.request):
                self._refused += [_error(each, each.output, problem) for each in _every_sample(sequence)]
            else:
                self._scheduler.waiting.append(sequence)

    def cancel(self) -> list[Request]:
        """Drop all requests, running and waiting, and free their blocks; what was dropped, in order."""
        self._abandon(None)
        return [sequence.request for sequence in self._scheduler.cancel()]

    def _launch(self) -> bool:
        """Schedule the next step and start it; whether there was one."""
        started, evicted = time.time_ns() // 1000, self._pool.evictions
        schedule = self._scheduler.schedule(may_preempt=not self._launched)
        if schedule is None:
            return False
        stats = self._stats_at_launch(schedule, started, self._pool.evictions - evicted)
        try:
            batch = build_batch(
                self._table,
                schedule.slots,
                schedule.counts,
                forks=schedule.forks,
                copies=schedule.copies,
                prefixes=schedule.prefixes,
            )
            step = self._executor.launch(batch)
        except BaseException:
            self._abandon(schedule)
            raise
        self._launched.append(_Launched(schedule, self._scheduler.launched(schedule), stats, step))
        self._steps += 1
        return True

    def _wait(self) -> tuple[Drawn, int]:
        """What the oldest launched step drew, and the nanoseconds it was waited for."""
        begin = time.perf_counter_ns()
        try:
            drawn = self._launched[0].step.wait()
        except BaseException:
            self._abandon(None)
            raise
        return drawn, time.perf_counter_ns() - begin

    def _abandon(self, scheduled: Schedule | None) -> None:
        """Take back all steps that were not read, and the one that was scheduled and could not be launched."""
        for launched in self._launched:
            with suppress(Exception):  # how a step that is taken back ends does not matter any more
                launched.step.wait()
        self._scheduler.abandon([(each.schedule, each.drawing) for each in self._launched], scheduled)
        self._launched.clear()

    def _since_last_read(self, launched: _Launched) -> int:
        """Microseconds since the step was launched or the one before it was read, whichever is later."""
        now = time.time_ns() // 1000
        begin, self._last_read_us = max(launched.stats.started_at, self._last_read_us), now
        return max(0, now - begin)

    def _stats_at_launch(self, schedule: Schedule, started: int, evictions: int) -> StepStats:
        allocated, reserved = self._executor.memory()
        return StepStats(
            step=self._steps,
            started_at=started,
            duration_us=0,
            running=schedule.running,
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
            shared_blocks=int(self._table.num_blocks[self._table.running].sum()) - self._pool.live,
            duplicate_blocks=schedule.duplicate_blocks,
            copied_blocks=len(schedule.copies),
            evictions=evictions,
            preemptions=schedule.preemptions,
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
        )

    def _problem(self, request: Request) -> str | None:
        """Why a request can never run, or None."""
        length, limit = len(request.token_ids), self.limits.max_model_len - 1
        if request.samples > self.limits.max_seqs:
            return f"{request.samples} samples, and at most max_seqs {self.limits.max_seqs} run at a time"
        if not length:
            return "the prompt has no tokens"
        if length > limit:
            return (
                f"the prompt has {length} tokens, and at most {limit} fit "
                f"(max_model_len {self.limits.max_model_len} less one token of output)"
            )
        return None

    def _read(self, launched: _Launched, drawn: Drawn) -> tuple[list[Completion], StepStats]:
        """Take in what a step drew: release what had ended before it, append the tokens, end what is done."""
        table, slots, positions = self._table, launched.drawing.slots, launched.drawing.positions
        dropped = table.ended[slots]
        for slot in slots[dropped].tolist():
            self._scheduler.release(slot)
        failed = drawn.failed & ~dropped
        going = ~drawn.failed & ~dropped
        completions = self._end_failed(slots[failed], positions[failed]) if failed.any() else []
        completions += self._advance(slots[going], positions[going], drawn.token_ids[going])
        stats = replace(
            launched.stats,
            duration_us=self._since_last_read(launched),
            dropped_tokens=int(np.count_nonzero(dropped)),
        )
        return completions, stats

    def _advance(
        self, slots: Slots, positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]
    ) -> list[Completion]:
        """Put the drawn tokens into their places and end the sequences that are done."""
        table = self._table
        table.read(slots, positions, token_ids)
        stop_at = self._match_stop_strings(slots, token_ids)
        stopped = (table.stop_ids[slots] == token_ids[:, None]).any(axis=1) | (positions + 1 >= table.stop_total[slots])
        if stop_at:
            stopped |= np.isin(slots, list(stop_at))
        ended = stopped | (positions + 1 >= table.token_limit[slots])
        if not ended.any():
            return []
        table.num_tokens[slots[ended]] = positions[ended] + 1  # a token drawn after its end does not count
        self._scheduler.record_ends(slots[ended], stopped[ended])
        completions = []
        for slot, by_stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            reason: FinishReason = "stop" if by_stop else "length"
            completions.append(_completion(table.sequence(slot), table.output(slot), reason, stop_at=stop_at.get(slot)))
        self._finish(slots[ended])
        return completions

    def _end_failed(self, slots: Slots, positions: npt.NDArray[np.int64]) -> list[Completion]:
        """End sequences whose logits are not finite; an error for each that does not get another try."""
        table = self._table
        table.num_tokens[slots] = positions
        errors = [
            _error(table.sequence(slot), table.output(slot), f"the logits after token {position} are not finite")
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
            if self._scheduler.fail(slot)
        ]
        self._finish(slots)
        return errors

    def _finish(self, slots: Slots) -> None:
        """End sequences; their slots and blocks are free once no launched step computes them."""
        self._table.ended[slots] = True
        computed = np.zeros(self.limits.max_seqs, np.bool_)
        for launched in self._launched:
            computed[launched.schedule.slots] = True
        for slot in slots[~computed[slots]].tolist():
            self._scheduler.release(slot)

    def _match_stop_strings(self, slots: Slots, token_ids: npt.NDArray[np.int32]) -> dict[int, int]:
        """Slots whose output now holds a stop string, with the characters before it."""
        found: dict[int, int] = {}
        matched = self._table.has_stop_strings[slots]
        for slot, token_id in zip(slots[matched].tolist(), token_ids[matched].tolist(), strict=True):
            matcher = self._table.sequence(slot).stop_matcher
            if matcher is not None:
                at = matcher.push(token_id)
                if at is not None:
                    found[slot] = at
        return found


def _completion(
    sequence: Sequence,
    output: TokenIds,
    reason: FinishReason,
    *,
    stop_at: int | None = None,
    error: str | None = None,
) -> Completion:
    return Completion(
        row_id=sequence.request.row_id,
        sample=sequence.request.sample,
        token_ids=output,
        finish_reason=reason,
        prompt_tokens=len(sequence.request.token_ids),
        cached_tokens=sequence.cached_tokens or 0,
        error=error,
        stop_at=stop_at,
    )


def _every_sample(sequence: Sequence) -> list[Sequence]:
    return [sequence, *(sequence.fork() for _ in range(sequence.forks))]


def _error(sequence: Sequence, output: TokenIds, problem: str) -> Completion:
    return _completion(sequence, output, "error", error=f"row {sequence.request.row_id}: {problem}")
