"""A whole job on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.job_runs import TinyJob, questions


def test_a_job_on_the_gpu_gives_the_completions_of_the_cpu_and_records_its_memory(tmp_path: Path) -> None:
    job = TinyJob(tmp_path, head_dim=64)
    job.write(questions(60))
    on_cpu = job.run("cpu")
    on_gpu = job.run("gpu", "engine.device=cuda", "model.dtype=float32", "engine.kv_memory=256MiB")
    assert on_gpu.code == 0
    assert on_gpu.texts() == on_cpu.texts()
    summary = on_gpu.summary
    assert "NVIDIA" in summary["device"]
    assert summary["peak_bytes"] > 0
    assert summary["memory_plan"]["activations"] > 0
    assert all(0 < step["gpu_allocated_bytes"] <= step["gpu_reserved_bytes"] for step in on_gpu.steps)


def test_bfloat16_is_chosen_on_a_gpu_and_the_pool_fills_it(tmp_path: Path) -> None:
    job = TinyJob(tmp_path, head_dim=64)
    job.write(questions(20))
    output = job.run("auto", "engine.device=auto", "engine.kv_memory=auto", "engine.max_seqs=16")
    assert output.code == 0
    assert output.summary["memory_plan"]["pool"] > 0.8 * torch.cuda.get_device_properties(0).total_memory
