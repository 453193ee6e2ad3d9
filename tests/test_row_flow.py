"""Rows with several samples through whole jobs: each comes back n times, together or not at all."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.job_runs import Output, TinyJob, questions

ROWS, SAMPLES = 20, 3
DRAWN = ("sampling.temperature=1", "sampling.seed=7")
THRICE = (*DRAWN, f"sampling.n={SAMPLES}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    job = TinyJob(tmp_path_factory.mktemp("samples"))
    job.write(questions(ROWS))
    return job


@pytest.fixture(scope="module")
def thrice(tiny: TinyJob) -> Output:
    return tiny.run("thrice", *THRICE)


def completions(output: Output) -> list[tuple[int, int, str]]:
    return [(row["row_id"], row["sample"], row["completion"]) for row in output.completions]


def total(steps: list[dict[str, Any]], column: str) -> int:
    return sum(step[column] for step in steps)


def test_every_row_comes_back_n_times_in_order_with_its_columns(thrice: Output) -> None:
    # trap 43
    assert thrice.code == 0
    assert [(row["row_id"], row["sample"]) for row in thrice.completions] == [
        (row, sample) for row in range(ROWS) for sample in range(SAMPLES)
    ]
    asked = questions(ROWS)
    assert [row["question"] for row in thrice.completions] == [asked[row["row_id"]] for row in thrice.completions]


def test_samples_of_a_row_differ_and_come_again_with_the_seed(tiny: TinyJob, thrice: Output) -> None:
    # trap 13
    texts = completions(thrice)
    assert len({text for _, _, text in texts}) > 0.9 * len(texts)
    assert completions(tiny.run("again", *THRICE)) == texts
    assert completions(tiny.run("other", *THRICE, "sampling.seed=8")) != texts


def test_sample_0_is_the_only_sample_of_a_job_without_n(tiny: TinyJob, thrice: Output) -> None:
    once = tiny.run("once", *DRAWN)
    assert completions(once) == [each for each in completions(thrice) if each[1] == 0]
    assert once.schema == thrice.schema


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.kv_memory=1MiB", "engine.admission=greedy"],
        ["engine.prefix_cache=false"],
        ["engine.max_seqs=3"],
        ["engine.max_batch_tokens=70"],
        ["order.by=longest", "engine.block_size=32"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_samples_do_not_depend_on_how_the_job_is_run(tiny: TinyJob, thrice: Output, overrides: list[str]) -> None:
    # traps 10, 12
    name = overrides[0].replace("=", "-")
    output = tiny.run(name, *THRICE, *overrides)
    assert completions(output) == completions(thrice)
    if "kv_memory" in name:
        assert total(output.steps, "preemptions") > 0


def test_a_prompt_counts_once_and_is_computed_once(tiny: TinyJob, thrice: Output) -> None:
    summary, steps = thrice.summary, thrice.steps
    prompts = {row["row_id"]: row["prompt_tokens"] for row in thrice.completions}
    assert summary["prompt_tokens"] == sum(prompts.values())
    assert (summary["rows"], summary["completions"]) == (ROWS, ROWS * SAMPLES)
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in thrice.completions)
    prefilled = total(steps, "prefill_tokens") - total(steps, "recomputed_tokens")
    assert total(steps, "cached_tokens") + prefilled == summary["prompt_tokens"]
    cached = {row["row_id"]: row["cached_tokens"] for row in thrice.completions}
    assert all(row["cached_tokens"] == cached[row["row_id"]] for row in thrice.completions)
    assert summary["cached_tokens"] == sum(cached.values()) == total(steps, "cached_tokens")
    assert summary["copied_blocks"] > 0
    assert summary["shared_blocks"] > 0


def test_a_row_that_cannot_run_has_n_error_rows(tiny: TinyJob) -> None:
    path = tiny.write(["one?", "", "x" * 600, "two?"], "broken.parquet")
    output = tiny.run("broken", f"source.path={path}", *THRICE)
    assert output.code == 3
    errors = [row for row in output.completions if row["error"] is not None]
    assert [(row["row_id"], row["sample"]) for row in errors] == [(row, each) for row in (1, 2) for each in range(3)]
    assert {row["finish_reason"] for row in errors} == {"error"}
    summary = output.summary
    assert (summary["rows"], summary["completions"], summary["errors"]) == (4, 12, 6)


def test_files_hold_rows_per_part_output_rows(tiny: TinyJob, thrice: Output) -> None:
    output = tiny.run("parts", *THRICE, "sink.rows_per_part=4", "sink.commit_every=1")
    files = sorted((output.folder / "completions").iterdir())
    assert [pq.read_metadata(path).num_rows for path in files] == [4] * (ROWS * SAMPLES // 4)
    assert completions(output) == completions(thrice)


def test_greedy_samples_are_equal_and_the_job_says_so(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    output = tiny.run("greedy", "sampling.n=2", "source.limit=4")
    texts = completions(output)
    assert [text for _, sample, text in texts if sample == 0] == [text for _, sample, text in texts if sample == 1]
    assert "writes the same completion 2 times a row" in capsys.readouterr().err


def test_n_is_part_of_the_run(tiny: TinyJob, thrice: Output, capsys: pytest.CaptureFixture[str]) -> None:
    # trap 46
    assert tiny.run("thrice", *DRAWN, "sampling.n=2").code == 2
    assert "sampling.n was 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.n=0"], "sampling.n: 0; accepted: a whole number from 1"),
        (["sampling.n=65"], "sampling.n: 65; accepted: at most engine.max_seqs=64"),
        (["sampling.n=3", "engine.max_seqs=2"], "sampling.n: 3; accepted: at most engine.max_seqs=2"),
    ],
)
def test_more_samples_than_run_side_by_side_are_refused(
    tiny: TinyJob, overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("refused", *overrides).code == 2
    assert words in capsys.readouterr().err
