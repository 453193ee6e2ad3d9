"""A device that runs out of memory: the engine goes on once with fewer blocks, and every row is there."""

from __future__ import annotations

import pytest

from engine.batch import Batch
from engine.engine import Engine
from engine.executor import DeviceOutOfMemoryError
from engine.scheduler import Limits
from tests.fake_executor import END, FakeExecutor, FakeStep, check_invariants, expected_output, request

BLOCK_SIZE = 4


class RunsOut(FakeExecutor):
    """Raises once `steps` are launched."""

    def __init__(self, num_blocks: int, steps: int, depth: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, depth=depth)
        self._left = steps

    def launch(self, batch: Batch) -> FakeStep:
        if not self._left:
            raise DeviceOutOfMemoryError("out of memory")
        self._left -= 1
        return super().launch(batch)


def make(steps: int, smaller: int, *, async_steps: bool, then: int = 10_000) -> tuple[Engine, list[int]]:
    made: list[int] = []

    def smaller_pool() -> tuple[FakeExecutor, int]:
        made.append(smaller)
        return RunsOut(smaller, then, int(async_steps)), smaller

    engine = Engine(
        RunsOut(40, steps, int(async_steps)),
        Limits(6, 20, 1000),
        num_blocks=40,
        block_size=BLOCK_SIZE,
        async_steps=async_steps,
        end_token_ids=(END,),
        smaller_pool=smaller_pool,
    )
    return engine, made


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_rows_go_on_in_the_smaller_pool_and_nothing_they_drew_is_lost(steps: int, async_steps: bool) -> None:
    engine, made = make(steps, 20, async_steps=async_steps)
    rows = [request(row, [1 + row % 3] * (3 + row), max_tokens=12) for row in range(12)]
    for each in rows:
        engine.add(each)
    outputs: dict[int, list[int]] = {}
    totals = set()
    while engine.has_work:
        result = engine.step()
        check_invariants(engine)
        for completion in result.completions:
            assert completion.row_id not in outputs
            outputs[completion.row_id] = completion.token_ids.tolist()
        if result.stats is not None:
            totals.add(result.stats.blocks_total)
    assert made == [20]
    assert outputs == {each.row_id: expected_output(each, 80) for each in rows}
    assert totals == ({20} if steps == 0 or (steps == 1 and async_steps) else {40, 20})


def test_a_row_too_long_for_the_smaller_pool_is_an_error_and_the_others_end() -> None:
    engine, _ = make(1, 10, async_steps=False)
    engine.add(request(0, [1] * 60, max_tokens=4))
    engine.add(request(1, [2] * 5, max_tokens=4))
    found = {}
    while engine.has_work:
        found |= {completion.row_id: completion for completion in engine.step().completions}
    assert "at most 39 fit" in (found[0].error or "")
    assert found[1].error is None


def test_it_goes_on_only_once() -> None:
    engine, made = make(2, 20, async_steps=False, then=1)
    engine.add(request(0, [1] * 5, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.step()
    engine.step()
    with pytest.raises(DeviceOutOfMemoryError):
        engine.step()
    assert made == [20]
    assert engine.cancel()[0].row_id == 0
