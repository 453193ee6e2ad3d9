"""`mode=plan` against the runs it speaks of."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.pool_estimate import PoolEstimate
from runner.config import ModelSection, RunConfig, SamplingSection, SinkConfig, SourceConfig
from runner.forecast import Forecast
from runner.job_plan import render_plan
from tests.job_runs import TinyJob, questions

ROWS = 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    job = TinyJob(tmp_path_factory.mktemp("tiny"))
    job.write([*questions(ROWS), "", "x" * 600, "y" * 700])
    return job


def plan(job: TinyJob, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, str]:
    assert job.run("planned", "mode=plan", *overrides).code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:13].strip() or f"problem {at}": line[14:] for at, line in enumerate(lines)}


def test_it_tells_what_the_run_will_find(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    output = tiny.run("run")
    summary = output.summary
    assert output.code == 3
    capsys.readouterr()
    told = plan(tiny, capsys)
    assert told["rows"] == f"{summary['rows']}, {summary['errors']} of them cannot run"
    assert told["problem 1"].startswith(f"2 ({ROWS + 1}, {ROWS + 2}): the prompt has 600 tokens and the limit is 511")
    assert told["problem 2"].startswith(f"1 ({ROWS}): column 'question' is empty")
    assert told["prompts"].startswith(f"{summary['prompt_tokens']:,} tokens")
    hits = round(summary["highest_hit_rate"] * summary["prompt_tokens"])
    assert f"{summary['highest_hit_rate']:.1%}: {hits:,} tokens from the cache" in told["prefix hits"]
    assert f"{summary['prompt_tokens'] - hits:,} to compute" in told["prefix hits"]
    assert told["output"] == f"{12 * ROWS} tokens at most, in {ROWS} completions"
    blocks = output.steps[0]["blocks_total"]
    assert told["pool"].startswith(f"{blocks:,} blocks of 16 tokens, 0.06 GiB")


def test_windows_of_few_rows_change_only_what_they_share(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parted = plan(tiny, capsys), plan(tiny, capsys, "order.window=1KiB")
    assert whole["prefix hits"] != parted["prefix hits"]
    del whole["prefix hits"], parted["prefix hits"], whole["at once"], parted["at once"]
    assert whole == parted


def test_it_leaves_no_file_and_heeds_none(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    plan(tiny, capsys, f"sink.path={tiny.folder / 'nothing'}")
    assert not (tiny.folder / "nothing").exists()
    tiny.run("done", "source.limit=3")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tiny.folder / "done").rglob("*"))
    capsys.readouterr()
    told = plan(tiny, capsys, f"sink.path={tiny.folder / 'done'}", "sampling.seed=5")
    assert told["rows"].startswith(f"{ROWS + 3},")
    assert sorted((path, path.stat().st_mtime_ns) for path in (tiny.folder / "done").rglob("*")) == before


def test_it_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = TinyJob(tmp_path)
    job.write(questions(5))
    for path in job.model.glob("*.safetensors"):
        path.unlink()
    assert plan(job, capsys)["rows"] == "5, 0 of them cannot run"


def test_samples_multiply_the_output_and_share_the_prompt(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    one, three = plan(tiny, capsys), plan(tiny, capsys, "sampling.n=3", "sampling.temperature=1")
    assert three["output"] == f"{36 * ROWS:,} tokens at most, in {3 * ROWS} completions"
    assert three["prompts"] == one["prompts"]
    assert "for its 3 samples" in three["largest row"]


def test_a_small_pool_limits_the_rows_as_it_does_in_the_run(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["engine.kv_memory=160KiB"]  # 6 blocks
    output = tiny.run("small", *small)
    capsys.readouterr()
    told = plan(tiny, capsys, *small)
    assert output.summary["errors"] > 3
    assert told["rows"] == f"{ROWS + 3}, {output.summary['errors']} of them cannot run"
    assert "raise engine.kv_memory" in told["problem 1"]


def test_without_a_prefix_cache_there_are_no_hits(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny, capsys, "engine.prefix_cache=false")["prefix hits"].startswith("none")


@pytest.mark.parametrize("override", ["engine.kv_memory=1KiB", "sampling.n=65", "prompt.column=nothing"])
def test_what_the_run_refuses_is_refused(tiny: TinyJob, override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("refused", "mode=plan", override).code == 2
    assert override.split("=")[0] in capsys.readouterr().err


def test_no_rows_are_planned(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(tiny, capsys, "source.limit=0")
    assert told["rows"] == "0, 0 of them cannot run"
    assert set(told) == {"rows", "pool"}


def test_a_pool_that_this_machine_does_not_hold_is_told() -> None:
    forecast = Forecast(10, (), 1000, 100, 480, 200, blocks=80, longest_blocks=9)
    pool = PoolEstimate(weights=16 << 30, block=1 << 30, pool=40 << 30, room=8 << 30, is_bound=False)
    config = RunConfig(
        source=SourceConfig(path="rows"),
        model=ModelSection(path="model"),
        sink=SinkConfig(path="out"),
        sampling=SamplingSection(n=2),
    )
    lines = render_plan(forecast, pool, config, max_seqs=64).splitlines()
    assert lines[-3].endswith(
        "40 blocks of 16 tokens, 40.00 GiB, more than the 8.00 GiB that this machine has beside 16.00 GiB of weights"
    )
    assert lines[-1].endswith(
        "5 rows of mean size at full length fit, about 8 with shared blocks held once; "
        "engine.max_seqs 64 for 2 samples a row"
    )
