"""The demo job on real weights: the same completions whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from runner.__main__ import main
from runner.paths import resolve_path

ROWS = 12
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _all_cores() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def run(out: Path, *overrides: str) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """Completions by ticket, and the steps."""
    assert main(["job=demo", f"source.limit={ROWS}", f"sink.path={out}", *overrides]) == 0
    rows = ds.dataset(out / "completions").to_table().to_pylist()
    assert len(rows) == ROWS
    return {row["id"]: row["completion"] for row in rows}, ds.dataset(out / "stats").to_table().to_pylist()


@pytest.mark.parametrize("sampling", [[], ["sampling.temperature=0.8", "sampling.seed=7"]], ids=["greedy", "seeded"])
def test_the_demos_completions_do_not_depend_on_the_schedule(sampling: list[str], tmp_path: Path) -> None:
    # traps 6, 12
    plain, steps = run(tmp_path / "plain", *sampling)
    assert sum(step["cached_tokens"] for step in steps) > 0
    tight, steps = run(tmp_path / "tight", *sampling, "engine.kv_memory=30MiB", "engine.admission=greedy")
    assert sum(step["preemptions"] for step in steps) > 0
    assert tight == plain
    cold, steps = run(tmp_path / "cold", *sampling, "engine.prefix_cache=false")
    assert sum(step["cached_tokens"] for step in steps) == 0
    assert cold == plain
    assert run(tmp_path / "single", *sampling, "engine.max_seqs=1")[0] == plain
    table = pq.read_table(resolve_path("package://jobs/demo/support.parquet")).slice(0, ROWS)
    pq.write_table(table.take([*range(ROWS - 1, 4, -1), 2, 0, 4, 1, 3]), tmp_path / "shuffled.parquet")
    assert run(tmp_path / "shuffled", *sampling, f"source.path={tmp_path / 'shuffled.parquet'}")[0] == plain
