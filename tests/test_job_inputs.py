from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner.config import ModelSection, PromptConfig, RunConfig, SamplingSection, SinkConfig, SourceConfig
from runner.job_inputs import JobInputs
from tests.job_runs import TinyJob, questions


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    job = TinyJob(tmp_path_factory.mktemp("tiny"))
    job.write(questions(20))
    return job


def inputs(job: TinyJob, *, sampling: SamplingSection | None = None, **source: int) -> JobInputs:
    config = RunConfig(
        source=SourceConfig(path=str(job.folder / "rows.parquet"), **source),
        prompt=PromptConfig(column="question"),
        model=ModelSection(path=str(job.model)),
        sampling=sampling or SamplingSection(),
        sink=SinkConfig(path=str(job.folder / "out")),
    )
    return JobInputs(config)


@pytest.mark.parametrize(
    ("source", "rows"),
    [({}, 20), ({"skip": 5}, 15), ({"skip": 5, "limit": 4}, 4), ({"skip": 30}, 0), ({"limit": 0}, 0)],
)
def test_the_rows_of_a_job_are_those_after_skip_and_limit(tiny: TinyJob, source: dict[str, int], rows: int) -> None:
    opened = inputs(tiny, **source)
    assert opened.num_rows == rows
    windows = list(opened.windows(np.empty(0, np.int64), stopped=lambda: False))
    assert sum(len(window.row_ids) for window in windows) == rows


def test_requests_ask_for_all_samples(tiny: TinyJob) -> None:
    opened = inputs(tiny, sampling=SamplingSection(n=4, temperature=1.0, seed=3))
    (window,) = opened.windows(np.array([0, 1], np.int64), stopped=lambda: False)
    assert sorted(request.row_id for request in window.requests) == list(range(2, 20))
    assert {(request.samples, request.sample, request.sampling.seed) for request in window.requests} == {(4, 0, 3)}


def test_a_small_pool_shortens_prompts_that_are_made_after(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    opened = inputs(tiny)
    opened.limit_length(10_000)
    assert capsys.readouterr().err == ""
    opened.limit_length(32)
    assert "engine.max_model_len is 32 tokens: all that the K/V pool holds" in capsys.readouterr().err
    (window,) = opened.windows(np.empty(0, np.int64), stopped=lambda: False)
    assert len(window.errors) == 20
    assert "raise engine.kv_memory" in window.errors[0].error


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    job = TinyJob(tmp_path)
    job.write(questions(3))
    for path in job.model.glob("*.safetensors"):
        path.unlink()
    assert inputs(job).num_rows == 3
