"""Writes small inputs and reads them back through `open_source`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runner.config import SourceConfig
from runner.source import Source, open_source

BIG_ID = 2**53 + 1


def open_path(path: object, **keys: Any) -> Source:
    return open_source(SourceConfig(path=str(path), **keys))


def read(source: Source, *columns: str, skip: int = 0, limit: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Every row with its row id."""
    rows = []
    for batch in source.batches(columns, skip, limit):
        rows += list(enumerate(batch.table.to_pylist(), start=batch.first_row_id))
    return rows


def texts(source: Source, **window: Any) -> list[str]:
    return [row["text"] for _, row in read(source, "text", **window)]


def write_parquet(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
