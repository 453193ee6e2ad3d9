from __future__ import annotations

import pytest
import torch

from engine.models.weight_copy import WeightCopy, chunks

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_bytes", [8, 24, 100, 1 << 20])
def test_chunks_cover_every_tensor_once_and_are_no_larger_than_asked(chunk_bytes: int) -> None:
    sources = [torch.randn(5, 7, dtype=torch.float64), torch.randn(3), torch.randn(())]
    targets = [torch.zeros(source.shape) for source in sources]
    for target, source in chunks(zip(targets, sources, strict=True), chunk_bytes):
        assert source.nbytes <= chunk_bytes
        assert target.shape == source.shape
        target += source
    assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources, strict=True))


def test_a_target_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        list(chunks([(torch.zeros(4, 6)[:, :3], torch.zeros(4, 3))], 64))


def test_on_the_cpu_views_are_filled_and_converted() -> None:
    parameter = torch.zeros(4, 6, dtype=torch.bfloat16)
    source = torch.randn(2, 6)
    with WeightCopy(CPU) as weight_copy:
        weight_copy.copy([(parameter[2:], source)])
    assert torch.equal(parameter, torch.cat((torch.zeros(2, 6), source)).bfloat16())
