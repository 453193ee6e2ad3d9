"""Whole jobs for tests: a tiny model folder, a Parquet table, and what a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from runner.__main__ import main
from tests.tiny_models import save_tiny_model

INSTRUCTION = "Answer with one short word, and nothing else, whatever the question may be about. "
SUBJECTS = ("sea", "bread", "ants", "rain", "iron", "moon", "glass", "wool", "salt", "fire", "sand", "oak")


def questions(count: int) -> list[str]:
    """Prompts behind one instruction; every fifth repeats an earlier one, and lengths differ."""
    asked = [
        f"{INSTRUCTION}Q{row % (count * 4 // 5 + 1)}: {SUBJECTS[row % 12] * (1 + row % 7)}?" for row in range(count)
    ]
    return asked


@dataclass(frozen=True)
class Output:
    """What a job left: its tables, summary and exit code."""

    code: int
    folder: Path

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Rows in the order in which a reader of the folder gets them."""
        return ds.dataset(self.folder / "completions").to_table().to_pylist()

    @property
    def schema(self) -> pa.Schema:
        return pq.read_schema(next((self.folder / "completions").glob("*.parquet")))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return ds.dataset(self.folder / "stats").to_table().to_pylist()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary" / "shard-00000.json").read_text())

    def texts(self) -> dict[str, tuple[Any, ...]]:
        """prompt -> what the row's output says, for comparisons across runs and orders."""
        return {
            row["question"]: (row["completion"], row["finish_reason"], row["output_tokens"]) for row in self.completions
        }


class TinyJob:
    """A folder with a tiny model and tables, and a way to run jobs on them."""

    def __init__(self, folder: Path, **model: Any) -> None:
        self.folder = folder
        self.model = folder / "model"
        save_tiny_model(self.model, tokenizer=True, **({"chat": False} | model))
        self.job = folder / "tiny.yaml"
        self.job.write_text(
            f"source: {{path: {folder / 'rows.parquet'}}}\n"
            "prompt: {column: question}\n"
            f"model: {{path: {self.model}}}\n"
            "engine: {kv_memory: 64MiB, device: cpu}\n"
            "sampling: {max_tokens: 12}\n"
            "sink: {keep_columns: [question]}\n"
        )

    def write(self, rows: Sequence[Any] | pa.Table, name: str = "rows.parquet") -> Path:
        """Write the input table: a list becomes the column `question`."""
        table = rows if isinstance(rows, pa.Table) else pa.table({"question": pa.array(rows, pa.string())})
        path = self.folder / name
        pq.write_table(table, path, row_group_size=7)
        return path

    def arguments(self, out: str, *overrides: str) -> list[str]:
        return [f"job={self.job}", f"sink.path={self.folder / out}", *overrides]

    def run(self, out: str, *overrides: str) -> Output:
        """Run the job in this process."""
        return Output(main(self.arguments(out, *overrides)), self.folder / out)
