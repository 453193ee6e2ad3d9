"""Small rows, steps and output folders for the tests of the output side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from engine.stats import StepStats
from runner.config import SinkConfig
from runner.ledger import Ledger
from runner.output_schema import completion_schema
from runner.publish import publish
from runner.sink import OutputRow, Sink
from runner.step_totals import Occupancy
from runner.summary import Summary

FINGERPRINT = {
    "model": {"path": "tiny", "weights": "abc"},
    "prompt": {"column": "text"},
    "sampling": {"temperature": 0.0, "stop": ["\n"]},
    "input": {"files": [{"path": "a.parquet", "rows": 12}]},
}
SCHEMA = completion_schema(id_field=None, kept=[], token_ids=False, prompt=False)
VERSIONS = {"torch": "2"}


def open_ledger(
    out: Path, fingerprint: dict[str, Any] = FINGERPRINT, schema: pa.Schema = SCHEMA, **more: Any
) -> Ledger:
    return Ledger(out, fingerprint, schema, versions=VERSIONS, **more)


def output_row(row_id: int, **changes: Any) -> OutputRow:
    values: dict[str, Any] = {
        "row_id": row_id,
        "sample": 0,
        "completion": f"answer {row_id}",
        "finish_reason": "stop",
        "error": None,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
    }
    return OutputRow(**{**values, **changes})


def error_row(row_id: int) -> OutputRow:
    return output_row(
        row_id, completion=None, finish_reason="error", error="too long", cached_tokens=0, output_tokens=0
    )


def step_stats(step: int, **changes: int) -> StepStats:
    values = {
        "step": step,
        "started_at": 1_700_000_000_000_000 + step,
        "duration_us": 1000,
        "running": 2,
        "waiting": 1,
        "prefill_tokens": 8,
        "decode_tokens": 2,
        "dropped_tokens": 0,
        "cached_tokens": 2,
        "recomputed_tokens": 0,
        "inflight_hit_tokens": 0,
        "blocks_total": 10,
        "blocks_live": 5,
        "blocks_cached": 3,
        "blocks_free": 2,
        "slack_tokens": 7,
        "shared_blocks": 0,
        "duplicate_blocks": 0,
        "copied_blocks": 0,
        "evictions": 0,
        "preemptions": 0,
        "gpu_allocated_bytes": 0,
        "gpu_reserved_bytes": 0,
    }
    return StepStats(**{**values, **changes})


def commit_rows(ledger: Ledger, row_ids: Iterable[int], *, config: SinkConfig | None = None, steps: int = 1) -> None:
    """One part with these rows and steps."""
    sink = Sink(ledger, config or SinkConfig(path=str(ledger.layout.out)))
    for step in range(steps):
        sink.record_step(step_stats(step))
    sink.write([output_row(row_id) for row_id in row_ids], None)
    sink.commit()


def publish_rows(ledger: Ledger, expected_rows: int, **config: Any) -> None:
    sink = SinkConfig(path=str(ledger.layout.out), **config)
    publish(ledger, sink, expected_rows=expected_rows, summary=job_summary(rows=expected_rows))


def read_folder(folder: Path) -> pa.Table:
    """A data folder as any reader sees it."""
    return pyarrow.dataset.dataset(folder, format="parquet").to_table()


def row_ids_of(folder: Path) -> list[int]:
    return read_folder(folder).column("row_id").to_pylist()


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def job_summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "rows": 1200,
        "completions": 1200,
        "errors": 2,
        "prompt_tokens": 40_000,
        "cached_tokens": 30_000,
        "output_tokens": 8_000,
        "attempt_rows": 1200,
        "attempt_prompt_tokens": 40_000,
        "attempt_output_tokens": 8_000,
        "recomputed_tokens": 10,
        "highest_hit_rate": 0.8,
        "hit_rate": 0.75,
        "inflight_hit_rate": 0.05,
        "missed_hit_tokens": 2_000,
        "steps": 500,
        "mean_live_fraction": 0.93,
        "rows_waited": True,
        "occupancy": Occupancy(live=0.85, cached=0.1, free=0.05),
        "waiting_occupancy": Occupancy(live=0.93, cached=0.06, free=0.01),
        "slack_fraction": 0.04,
        "shared_blocks": 320.0,
        "shared_fraction": 0.25,
        "duplicate_blocks": 6,
        "copied_blocks": 0,
        "preemptions": 3,
        "evictions": 7,
        "memory_plan": {"weights": 256 << 20, "pool": 1 << 30},
        "peak_bytes": 0,
        "seconds": {"load": 2.0, "generate": 16.0},
        "versions": VERSIONS,
        "device": "cpu",
    }
    return Summary(**{**values, **changes})
