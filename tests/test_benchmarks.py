"""Every command runs from its arguments to its line; speeds are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention_kernels, run_vllm, run_workload, start_up
from engine.models.config import read_model_config
from tests.tiny_models import tiny_config

MODELS = Path(run_workload.__file__).parent / "models"
SOURCE = {"device", "date", "commit", "versions"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights; its vocabulary holds the ids of all workloads."""
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama", head_dim=64, vocab_size=20_480, max_position_embeddings=4096).save_pretrained(folder)
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("flags", [[], ["--no-graphs", "--no-async", "--profile", "--order", "shuffled"]])
def test_a_workload_runs_to_its_last_token(flags: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--scale", "0.01", "--max-len", "2400", "--kv-blocks", "400"]
    run_workload.main(["groups", "--model", str(model), *size, *flags, "--commit", "abc"])
    line = printed(capsys)
    assert line.keys() >= SOURCE | {"seconds", "bound_seconds", "output_tok_s", "gpu_busy_share", "kernel_ms_per_step"}
    assert (line["workload"], line["model"], line["commit"]) == ("groups", model.name, "abc")
    assert line["order"] == ("shuffled" if flags else "sorted")
    assert (line["requests"], line["prompt_tokens"], line["output_tokens"]) == (8, 17_600, 800)
    assert (line["pool_blocks"], line["largest_batch"], line["preemptions"]) == (400, 8, 0)
    assert line["hit_rate"] == line["highest_hit_rate"] == 0.7955
    assert (line["prefill_tokens"], line["recompute_share"]) == (3600, 0)
    on_gpu = line["device"] != "cpu"
    assert line["cuda_graphs"] == line["async_steps"] == (on_gpu and not flags)
    assert line["host_us_per_step"] > 0
    assert (line["plan_error_bytes"] is None) == (not on_gpu)


def test_a_workload_larger_than_the_pool_is_no_less_complete(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_workload.main(["onesys", "--model", str(model), "--scale", "0.001", "--max-len", "2400", "--kv-blocks", "160"])
    line = printed(capsys)
    assert (line["requests"], line["output_tokens"]) == (4, 4 * 128)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that `run_workload` writes when it refuses these options."""
    with pytest.raises(SystemExit) as caught:
        run_workload.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_model_whose_vocabulary_lacks_ids_of_the_prompts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("llama", head_dim=64).save_pretrained(tmp_path)
    assert "vocab_size 320" in refused(
        ["nano", "--model", str(tmp_path), "--scale", "0.01", "--max-len", "2048"], capsys
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-len", "100"], "--max-len 100: groups has sequences of 2300 tokens"),
        (["--max-len", "8192"], "--max-len: 8192; accepted: at most 4096, the model's own limit"),
        (["--max-len", "4096", "--kv-blocks", "200"], "--max-len: 4096; accepted: at most 3200"),
        (["--max-len", "4096", "--kv-blocks", "100000000"], "--kv-blocks 100000000: the K/V pool would take"),
        (["--model", "/nowhere"], "--model /nowhere: a folder with a config.json"),
    ],
)
def test_a_workload_that_cannot_run_is_answered_by_the_option_to_change(
    options: list[str], named: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["groups", "--model", str(model), "--scale", "0.01", *options], capsys)
    assert named in said
    assert "engine." not in said


def test_attention_is_measured_against_float32(capsys: pytest.CaptureFixture[str]) -> None:
    attention_kernels.main(["--only", "decode 1x2048"])
    line = printed(capsys)
    assert line.keys() == SOURCE | {"problem", "ms", "plain_ms", "gb_s", "tflops", "rel_error"}
    assert line["rel_error"] < 5e-3


def test_start_up_splits_its_seconds_into_phases(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "RUNS", 1)
    start_up.main(["--model", str(model), "--max-len", "512"])
    line = printed(capsys)
    phases = ("imports", "config", "model", "plan", "graphs", "first_token")
    assert line.keys() == SOURCE | {"model", "seconds", "first_run_seconds", *(f"{phase}_seconds" for phase in phases)}
    assert sum(line[f"{phase}_seconds"] for phase in phases) == pytest.approx(line["seconds"], abs=0.01)


def test_vllm_need_not_be_there_to_ask_for_help() -> None:
    command = [sys.executable, "-m", "benchmarks.run_vllm", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=MODELS.parents[1])
    assert "--kv-blocks" in told.stdout


def test_vllm_that_is_not_there_is_said_in_a_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit):
        run_vllm.main(["nano", "--model", str(model)])
    assert "vLLM cannot be imported here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b"])
def test_a_model_shape_can_be_read(name: str) -> None:
    config = read_model_config(MODELS / name)
    assert (config.head_dim, config.max_position >= 8192) == (128, True)


def test_a_name_that_fits_no_attention_problem_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention_kernels.main(["--only", "zzz"])
    assert "no problem's name contains 'zzz'" in capsys.readouterr().err
