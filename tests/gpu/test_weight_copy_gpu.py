"""Weights through pinned buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.models.weight_copy import WeightCopy


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_tensors_arrive_whole_and_converted(tmp_path: Path, threads: int, dtype: torch.dtype) -> None:
    stored = {f"{n}": torch.randn(n * 37, 1000).bfloat16() for n in range(1, 9)}
    stored["wide"] = torch.randn(1000, 1001, dtype=torch.float64)
    save_file(stored, tmp_path / "weights.safetensors")
    device = torch.device("cuda", torch.cuda.current_device())
    targets = {name: torch.full(tensor.shape, torch.nan, dtype=dtype, device=device) for name, tensor in stored.items()}
    with (
        safe_open(tmp_path / "weights.safetensors", framework="pt") as weights,
        WeightCopy(device, threads=threads, chunk_bytes=100_000) as weight_copy,
    ):
        for _ in range(2):  # buffers are used again
            weight_copy.copy((target, weights.get_tensor(name)) for name, target in targets.items())
    assert all(torch.equal(targets[name].cpu(), tensor.to(dtype)) for name, tensor in stored.items())


def test_an_error_of_a_thread_is_raised() -> None:
    with WeightCopy(torch.device("cuda")) as weight_copy, pytest.raises(RuntimeError):
        weight_copy.copy([(torch.zeros(3, device="cuda"), torch.zeros(5))])
