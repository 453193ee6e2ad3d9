"""The rows that are read, tokenised and ordered together: as many as fit a stated memory with their token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.request import Request, Sampling
from runner.config import OrderConfig, SourceConfig
from runner.draw_ids import draw_ids
from runner.plan import plan_prompts
from runner.prompt import Prompt, PromptBuilder, RowError
from runner.source_batch import Source

RowIds = npt.NDArray[np.int64]

ROW_BYTES = 250
"""What a row takes beside its token ids: prompt, request and array, as measured. While a window is planned, it and its
token ids take about twice as much."""


@dataclass(frozen=True)
class Window:
    """Some consecutive rows of the source.

    `row_ids` int64 [rows] ascend. `carried` holds the source columns that go through to the output, one
    row each of `row_ids`. `requests` are in the order in which the engine takes them; `errors` are the
    rows that cannot run. `highest_hit_tokens` is the most of `prompt_tokens` that a prefix cache which
    starts empty can serve.
    """

    row_ids: RowIds
    carried: pa.Table | None
    requests: list[Request]
    errors: list[RowError]
    texts: dict[int, str]
    prompt_tokens: int
    highest_hit_tokens: int

    def carry(self, row_ids: Sequence[int]) -> pa.RecordBatch | None:
        """The carried columns of some rows, in that order; None where nothing is carried."""
        if self.carried is None:
            return None
        at = np.searchsorted(self.row_ids, np.array(row_ids, np.int64))
        return self.carried.take(pa.array(at)).combine_chunks().to_batches()[0]


class WindowReader:
    """Reads the rows of a job that are not committed yet, window by window.

    `carried_columns` go through to the output; an id column comes first among them. Every row is to be
    completed `samples` times.

    `stopped` is asked now and then; once it is true, or after `stop`, no further window comes.
    """

    def __init__(
        self,
        source: Source,
        builder: PromptBuilder,
        sampling: Sampling,
        *,
        rows: SourceConfig,
        order: OrderConfig,
        carried_columns: Sequence[str],
        block_size: int,
        committed: RowIds,
        stopped: Callable[[], bool],
        samples: int = 1,
    ) -> None:
        self._source = source
        self._builder = builder
        self._sampling = sampling
        self._rows = rows
        self._order = order
        self._carried_columns = list(carried_columns)
        self._block_size = block_size
        self._committed = committed
        self._stopped = stopped
        self._samples = samples
        self._closed = False

    def stop(self) -> None:
        """End the reading soon, from any thread."""
        self._closed = True

    def __iter__(self) -> Iterator[Window]:
        """The windows in source order; each is complete before it is handed on. Raises SourceError."""
        columns = list(dict.fromkeys((*self._builder.columns, *self._carried_columns)))
        batches: list[_Batch] = []
        held = 0
        for each in self._source.batches(columns, self._rows.skip, self._rows.limit):
            if self._closed or self._stopped():
                return
            batch = self._open(each.first_row_id, each.table)
            if batch is None:
                continue
            batches.append(batch)
            held += batch.held_bytes
            if held >= self._order.window_bytes:
                yield self._close(batches)
                batches, held = [], 0
        if batches:
            yield self._close(batches)

    def _open(self, first_row_id: int, table: pa.RecordBatch) -> _Batch | None:
        """The uncommitted rows of a batch with their prompts, None where there are none."""
        row_ids = np.arange(first_row_id, first_row_id + table.num_rows)
        wanted = np.isin(row_ids, self._committed, invert=True, assume_unique=True)
        if not wanted.all():
            row_ids, table = row_ids[wanted], table.filter(pa.array(wanted))
        if not len(row_ids):
            return None
        carried = table.select(self._carried_columns) if self._carried_columns else None
        return _Batch(row_ids, carried, self._builder.build(table, row_ids.tolist()))

    def _close(self, batches: Sequence[_Batch]) -> Window:
        built = [row for batch in batches for row in batch.built]
        prompts = [row for row in built if isinstance(row, Prompt)]
        token_ids = [prompt.token_ids for prompt in prompts]
        plan = plan_prompts(token_ids, self._order.by, self._block_size)
        row_ids = np.concatenate([batch.row_ids for batch in batches])
        parts = [batch.carried for batch in batches if batch.carried is not None]
        carried = pa.Table.from_batches(parts).combine_chunks() if parts else None
        names = self._draw_ids(row_ids, carried, prompts)
        return Window(
            row_ids=row_ids,
            carried=carried,
            requests=[
                Request(
                    prompts[at].row_id,
                    token_ids[at],
                    self._sampling,
                    draw_id=names[at],
                    samples=self._samples,
                    reuse=reuse,
                )
                for at, reuse in zip(plan.order.tolist(), plan.reuse, strict=True)
            ],
            errors=[row for row in built if isinstance(row, RowError)],
            texts={prompt.row_id: prompt.text for prompt in prompts if prompt.text is not None},
            prompt_tokens=sum(map(len, token_ids)),
            highest_hit_tokens=plan.highest_hit_tokens,
        )

    def _draw_ids(self, row_ids: RowIds, carried: pa.Table | None, prompts: Sequence[Prompt]) -> Sequence[int | None]:
        """What the rows of `prompts` are called by the random generator; None leaves it at the row id."""
        if self._rows.id_column is None or carried is None or not self._sampling.temperature or not prompts:
            return [None] * len(prompts)
        mine = np.array([prompt.row_id for prompt in prompts], np.int64)
        ids = carried.column(0).take(pa.array(np.searchsorted(row_ids, mine)))  # the id column is carried first
        return draw_ids(ids, mine, [prompt.token_ids for prompt in prompts]).tolist()


class ReadAhead:
    """Hands out windows, making the next one in a thread while the one before is used."""

    def __init__(self, windows: WindowReader) -> None:
        self.exhausted = False
        self._reader = windows
        self._windows = iter(windows)
        self._thread = ThreadPoolExecutor(1, "windows")
        self._coming = self._submit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.stop()
        self._thread.shutdown(cancel_futures=True)

    def take(self, *, wait: bool) -> Window | None:
        """The next window; None if there is none left (see `exhausted`) or, without `wait`, none ready.

        Raises SourceError.
        """
        if self.exhausted or not (wait or self._coming.done()):
            return None
        window = self._coming.result()
        if window is None:
            self.exhausted = True
        else:
            self._coming = self._submit()
        return window

    def _submit(self) -> Future[Window | None]:
        return self._thread.submit(next, self._windows, None)


@dataclass(frozen=True)
class _Batch:
    row_ids: RowIds
    carried: pa.RecordBatch | None
    built: list[Prompt | RowError]

    @property
    def held_bytes(self) -> int:
        """Of the rows with their token ids; without texts and carried columns."""
        token_ids = sum(row.token_ids.nbytes for row in self.built if isinstance(row, Prompt))
        return token_ids + ROW_BYTES * len(self.built)
