"""Windows over a real source: which rows they hold, in which order, and how they are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.request import Sampling
from runner.config import OrderConfig, PromptConfig, SourceConfig
from runner.plan import highest_hit_tokens, order_rows
from runner.prompt import PromptBuilder
from runner.source import SourceError
from runner.window import ROW_BYTES, ReadAhead, Window, WindowReader
from tests.source_rows import open_path, write_parquet
from tests.tiny_tokenizer import byte_level_tokenizer

GROUP = 4  # rows of a row group, and so of a batch
TOKENS = 5  # of every prompt
BATCH_BYTES = GROUP * (TOKENS * 4 + ROW_BYTES)
ROWS = 22


def prompt_of(row: int) -> list[int]:
    """Few different beginnings, in no order."""
    return [row * 7 % 3, row * 5 % 2, row * 3 % 4, row % 5, row]


def write_rows(folder: Path, ids: Sequence[Any] | None = None, **columns: Any) -> Path:
    prompts = pa.array([prompt_of(row) for row in range(ROWS)] if ids is None else ids, pa.list_(pa.int32()))
    return write_parquet(folder / "rows.parquet", {"ids": prompts, **columns}, row_group_size=GROUP)


def reader(
    path: Path,
    *,
    window: int = 2 * BATCH_BYTES,
    by: str = "prefix",
    carried: Sequence[str] = (),
    committed: Sequence[int] = (),
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stopped: Callable[[], bool] = lambda: False,
    **rows: Any,
) -> WindowReader:
    config = SourceConfig(path=str(path), **rows)
    source = open_path(path)
    builder = PromptBuilder(
        PromptConfig(token_ids_column="ids"),
        source.schema,
        None,
        max_model_len=64,
        max_tokens=4,
        vocab_size=100,
        keep_text=False,
    )
    return WindowReader(
        source,
        builder,
        sampling,
        rows=config,
        order=OrderConfig(by=by, window=str(window)),
        carried_columns=carried,
        block_size=2,
        committed=np.array(committed, np.int64),
        stopped=stopped,
    )


def row_ids(windows: Sequence[Window]) -> list[list[int]]:
    return [window.row_ids.tolist() for window in windows]


def requested(window: Window) -> list[int]:
    return [request.row_id for request in window.requests]


@pytest.mark.parametrize(("window", "rows"), [(1, 4), (BATCH_BYTES, 4), (BATCH_BYTES + 1, 8), (10**6, 22)])
def test_a_window_ends_with_the_batch_that_reaches_its_bytes(tmp_path: Path, window: int, rows: int) -> None:
    windows = list(reader(write_rows(tmp_path), window=window))
    assert row_ids(windows) == [list(range(at, min(at + rows, ROWS))) for at in range(0, ROWS, rows)]
    for each in windows:
        assert sorted(requested(each)) == each.row_ids.tolist()
        assert each.prompt_tokens == TOKENS * len(each.row_ids)


@pytest.mark.parametrize("by", ["prefix", "input", "longest"])
def test_requests_stand_in_the_order_asked_for_and_hits_are_counted_in_prefix_order(tmp_path: Path, by: str) -> None:
    ids = [prompt_of(row)[: 1 + row % 5] for row in range(ROWS)]
    (window,) = reader(write_rows(tmp_path, ids), window=10**6, by=by)
    arrays = [np.array(each, np.int32) for each in ids]
    assert requested(window) == order_rows(arrays, by).tolist()
    assert [request.token_ids.tolist() for request in window.requests] == [ids[row] for row in requested(window)]
    in_order = [arrays[row] for row in order_rows(arrays, "prefix")]
    assert window.highest_hit_tokens == highest_hit_tokens(in_order, 2) > 0


@pytest.mark.parametrize("by", ["prefix", "input", "longest"])
def test_requests_know_the_later_ones_of_their_window_that_begin_alike(tmp_path: Path, by: str) -> None:
    (window,) = reader(write_rows(tmp_path), window=10**6, by=by)
    known = 0
    for at, each in enumerate(window.requests):
        for tokens, distance in each.reuse:
            later = window.requests[at + distance]
            assert each.token_ids[:tokens].tolist() == later.token_ids[:tokens].tolist()
            assert tokens % 2 == 0, "whole blocks"
            known += 1
    assert known > ROWS // 2


def test_rows_that_cannot_run_fill_a_window_too(tmp_path: Path) -> None:
    windows = list(reader(write_rows(tmp_path, [None] * ROWS), window=2 * GROUP * ROW_BYTES))
    assert [len(window.errors) for window in windows] == [8, 8, 6]


def test_committed_rows_are_left_out_and_the_others_keep_their_ids(tmp_path: Path) -> None:
    # trap 45
    committed = [0, 3, 8, 9, 10, 11, 21]  # the third batch is committed as a whole
    windows = list(reader(write_rows(tmp_path), committed=committed))
    left = [row for row in range(ROWS) if row not in committed]
    assert [row for each in row_ids(windows) for row in each] == left
    for window in windows:
        assert {request.row_id: request.token_ids.tolist() for request in window.requests} == {
            row: prompt_of(row) for row in window.row_ids.tolist()
        }


def test_skip_and_limit_and_committed_rows_count_in_rows_of_the_source(tmp_path: Path) -> None:
    windows = reader(write_rows(tmp_path), committed=[6], skip=5, limit=9)
    assert [row for each in row_ids(list(windows)) for row in each] == [5, 7, 8, 9, 10, 11, 12, 13]


def test_a_job_without_rows_left_has_no_window(tmp_path: Path) -> None:
    # trap 54
    path = write_rows(tmp_path)
    assert list(reader(path, committed=range(ROWS))) == []
    assert list(reader(path, limit=0)) == []


def test_carried_columns_stay_with_their_row_in_any_order(tmp_path: Path) -> None:
    # trap 43
    ids = [None if row % 6 == 5 else prompt_of(row) for row in range(ROWS)]
    names = pa.array([None if row == 7 else f"name {row}" for row in range(ROWS)])
    path = write_rows(tmp_path, ids, name=names, unused=list(range(ROWS)), size=[row * 10 for row in range(ROWS)])
    for window in reader(path, carried=["size", "name"], committed=[1, 6, 14]):
        for asked in (window.row_ids[::-1].tolist(), window.row_ids[1:2].tolist(), requested(window)):
            carried = window.carry(asked)
            assert carried is not None
            assert carried.schema.names == ["size", "name"]
            assert carried.to_pylist() == [
                {"size": row * 10, "name": None if row == 7 else f"name {row}"} for row in asked
            ]


def test_where_nothing_is_carried_there_is_nothing_to_carry(tmp_path: Path) -> None:
    window = next(iter(reader(write_rows(tmp_path))))
    assert window.carry([0, 1]) is None


def test_the_prompt_column_may_be_carried_too(tmp_path: Path) -> None:
    window = next(iter(reader(write_rows(tmp_path), carried=["ids"])))
    carried = window.carry([2])
    assert carried is not None
    assert carried.to_pylist() == [{"ids": prompt_of(2)}]


def test_rows_that_cannot_run_are_errors_of_their_window_and_all_rows_are_one_or_the_other(tmp_path: Path) -> None:
    # traps 40, 42
    ids: list[Any] = [prompt_of(row) for row in range(ROWS)]
    ids[2], ids[9], ids[21] = None, [1] * 64, []
    windows = list(reader(write_rows(tmp_path, ids), window=1))
    assert [[error.row_id for error in window.errors] for window in windows] == [[2], [], [9], [], [], [21]]
    assert "row 9: the prompt has 64 tokens" in windows[2].errors[0].error
    assert windows[2].errors[0].prompt_tokens == 64
    for window in windows:
        failed = [error.row_id for error in window.errors]
        assert sorted(requested(window) + failed) == window.row_ids.tolist()
        assert window.prompt_tokens == TOKENS * len(window.requests)


def test_rows_without_a_single_prompt_are_still_handed_on(tmp_path: Path) -> None:
    (window,) = reader(write_rows(tmp_path, [None] * 6))
    assert (len(window.errors), window.requests, window.highest_hit_tokens) == (6, [], 0)


def test_a_row_draws_by_its_own_id_wherever_it_stands(tmp_path: Path) -> None:
    # trap 13
    random = Sampling(temperature=1.0)
    by_key = []
    for order in (range(ROWS), range(ROWS)[::-1]):
        path = write_rows(tmp_path, [prompt_of(key) for key in order], key=pa.array(order, pa.int64()))
        windows = reader(path, carried=["key"], id_column="key", sampling=random)
        requests = [request for window in windows for request in window.requests]
        by_key.append({order[request.row_id]: request.draw_id for request in requests})
    assert by_key[0] == by_key[1]
    assert None not in by_key[0].values()
    assert len({*by_key[0].values()}) == ROWS
    unnamed = [request.draw_id for window in reader(path, sampling=random) for request in window.requests]
    assert set(unnamed) == {None}, "without ids a row is called by its row id"


def test_prompt_texts_are_kept_by_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"text": ["b fox", None, "a dog"]})
    source = open_path(path)
    builder = PromptBuilder(
        PromptConfig(column="text"),
        source.schema,
        byte_level_tokenizer(),
        max_model_len=64,
        max_tokens=4,
        vocab_size=500,
        keep_text=True,
    )
    (window,) = WindowReader(
        source,
        builder,
        Sampling(),
        rows=SourceConfig(path=str(path)),
        order=OrderConfig(),
        carried_columns=[],
        block_size=16,
        committed=np.empty(0, np.int64),
        stopped=lambda: False,
    )
    assert window.texts == {0: "b fox", 2: "a dog"}


def test_once_stopped_no_further_window_comes(tmp_path: Path) -> None:
    path, stop = write_rows(tmp_path), False
    windows = iter(reader(path, stopped=lambda: stop))
    next(windows)
    stop = True
    assert list(windows) == []
    assert list(reader(path, stopped=lambda: True)) == []


def test_read_ahead_hands_out_every_window_once_and_then_is_exhausted(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    taken = []
    with ReadAhead(reader(path)) as windows:
        while not windows.exhausted:
            if (window := windows.take(wait=True)) is not None:
                taken.append(window)
        assert windows.take(wait=True) is None
        assert windows.take(wait=False) is None
    assert row_ids(taken) == row_ids(list(reader(path)))


def test_without_waiting_a_window_that_is_not_ready_is_none_and_comes_later(tmp_path: Path) -> None:
    go_on = threading.Event()
    with ReadAhead(reader(write_rows(tmp_path), stopped=lambda: not go_on.wait(60))) as windows:
        assert windows.take(wait=False) is None
        assert not windows.exhausted
        go_on.set()
        first = windows.take(wait=True)
        assert first is not None
        assert first.row_ids.tolist() == list(range(8))


def test_the_next_window_is_made_while_the_one_before_is_used(tmp_path: Path) -> None:
    batches, second = 0, threading.Event()

    def count() -> bool:
        nonlocal batches
        batches += 1
        if batches == 3:  # the first batch of the second window
            second.set()
        return False

    with ReadAhead(reader(write_rows(tmp_path), stopped=count)) as windows:
        assert windows.take(wait=True) is not None
        assert second.wait(60)


def test_what_the_source_raises_reaches_take_after_the_windows_before_it(tmp_path: Path) -> None:
    for part in range(2):
        prompts = pa.array([prompt_of(row) for row in range(8)], pa.list_(pa.int32()))
        write_parquet(tmp_path / f"{part}.parquet", {"ids": prompts}, row_group_size=GROUP)
    path = tmp_path / "1.parquet"
    windows = ReadAhead(_with_broken_file(reader(tmp_path), path))
    with windows:
        first = windows.take(wait=True)
        assert first is not None
        assert first.row_ids.tolist() == list(range(8))
        for _ in range(2):  # it stays an error: no later call takes it for the end
            with pytest.raises(SourceError, match=str(path)):
                windows.take(wait=True)
        assert not windows.exhausted


def _with_broken_file(windows: WindowReader, path: Path) -> WindowReader:
    """The reader, with a file of its open source cut short."""
    path.write_bytes(path.read_bytes()[:20])
    return windows


def test_leaving_does_not_wait_for_a_window_to_fill(tmp_path: Path) -> None:
    windows = reader(write_rows(tmp_path), window=10**12)
    read = threading.Event()
    batches = windows._source.batches

    def endless(*arguments: Any) -> Any:
        while True:
            for batch in batches(*arguments):
                yield batch
                read.set()

    windows._source.batches = endless  # type: ignore[method-assign]
    with ReadAhead(windows) as ahead:
        assert read.wait(10)
        assert ahead.take(wait=False) is None
