"""Rows that cannot run, and input that breaks, in whole jobs: the others finish."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.job_runs import INSTRUCTION, TinyJob
from tests.tiny_models import tiny_tokenizer


def test_rows_that_cannot_run_are_error_rows_and_the_others_complete(tmp_path: Path) -> None:
    # traps 40, 41, 42
    job = TinyJob(tmp_path)
    limit = 64
    lengths = {limit - 2: None, limit - 1: None, limit: "error", 4 * limit: "error"}
    rows = ["a" * length for length in lengths] + [None, "", "  \n", "fine"]
    job.write(rows)
    output = job.run("out", f"engine.max_model_len={limit}")
    assert output.code == 3
    found = output.completions
    assert [row["finish_reason"] == "error" for row in found] == [False, False, True, True, True, True, True, False]
    assert found[0]["output_tokens"] == 2
    assert found[1]["output_tokens"] == 1
    assert found[1]["finish_reason"] == "length"
    for row in found:
        assert (row["completion"] is None) == (row["finish_reason"] == "error") == (row["error"] is not None)
        if row["error"]:
            assert f"row {row['row_id']}" in row["error"]
    assert "the prompt has 64 tokens and the limit is 63" in found[2]["error"]
    assert job.run("out", f"engine.max_model_len={limit}").code == 3


def test_long_prompts_are_truncated_on_the_side_that_was_asked_for(tmp_path: Path) -> None:
    job = TinyJob(tmp_path)
    job.write(["b" * 100 + "tail"])
    limit = ["engine.max_model_len=64", "sampling.max_tokens=4", "sink.keep_prompt=true"]
    left = job.run("left", *limit, "prompt.on_too_long=truncate_left").completions[0]
    job.write(["b" * 56 + "tail"])
    same = job.run("same", *limit).completions[0]
    assert left["prompt_tokens"] == same["prompt_tokens"] == 60
    assert left["completion"] == same["completion"]
    assert left["prompt"] == "b" * 100 + "tail"


def test_a_row_larger_than_the_pool_is_an_error_and_the_others_finish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # trap 15
    job = TinyJob(tmp_path)
    job.write(["x" * 400, "short", "another"])
    output = job.run("out", "engine.kv_memory=400KiB")  # 16 blocks of 24 KiB: 256 tokens
    assert output.code == 3
    assert [row["finish_reason"] == "error" for row in output.completions] == [True, False, False]
    assert "raise engine.kv_memory" in output.completions[0]["error"]
    assert "engine.max_model_len" not in output.completions[0]["error"]
    capsys.readouterr()
    assert job.run("out", "engine.kv_memory=400KiB").code == 3
    assert "resume=restart" in capsys.readouterr().err
    assert job.run("out", "resume=restart").code == 0
    assert "discards the complete output of 3 rows" in capsys.readouterr().err


def test_rows_finished_before_the_input_turns_out_broken_stay_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = TinyJob(tmp_path)
    path = tmp_path / "rows.parquet"
    rows = [f"{row} " * 400 for row in range(600)]
    pq.write_table(pa.table({"question": rows}), path, row_group_size=50, use_dictionary=False)
    intact = path.read_bytes()
    last = pq.ParquetFile(path).metadata.row_group(11).column(0)
    start, size = last.data_page_offset, last.total_compressed_size
    path.write_bytes(intact[:start] + bytes(size) + intact[start + size :])
    small = ["order.window=64KiB", "prompt.on_too_long=truncate_left", "sampling.max_tokens=4"]

    assert job.run("out", *small).code == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert "row group 11" in message
    assert len(list((tmp_path / "out/_commits").glob("shard-00000-part-*.json"))) == 1
    assert job.run("out", *small).code == 2
    assert "resuming: " in capsys.readouterr().err


def test_a_row_that_spoils_its_own_k_v_spoils_no_other(tmp_path: Path) -> None:
    # trap 37
    job = TinyJob(tmp_path)
    weights = load_file(job.model / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("Z") - 33] = torch.nan  # the token of Z: printable bytes come in order
    save_file(weights, job.model / "model.safetensors", metadata={"format": "pt"})
    assert tiny_tokenizer(chat=False)("Z")["input_ids"] == [ord("Z") - 33]
    clean = [f"{INSTRUCTION}{subject}" for subject in ("sea", "rain", "sea and rain")]
    job.write([*clean[:1], f"{INSTRUCTION}Z", *clean[1:]])
    for sampling in ([], ["engine.prefix_cache=false"], ["engine.max_batch_tokens=64"]):
        output = job.run("out", *sampling, "resume=restart")
        assert output.code == 3
        assert [row["finish_reason"] == "error" for row in output.completions] == [False, True, False, False]
        assert "not finite" in output.completions[1]["error"]
        job.write(clean, "clean.parquet")
        alone = job.run("clean", *sampling, f"source.path={tmp_path / 'clean.parquet'}", "resume=restart")
        found = [row["completion"] for row in output.completions if not row["error"]]
        assert found == [row["completion"] for row in alone.completions]
