"""The compiled copy over page-locked memory."""

from __future__ import annotations

import pytest
import torch

from kernels.page_locked import copy_page_locked


@pytest.mark.parametrize("words", [1, 257, 200_000])
def test_a_graph_copies_what_its_source_holds_when_it_is_replayed(words: int) -> None:
    there = torch.zeros(words, dtype=torch.int32, pin_memory=True)
    device = torch.zeros(words, dtype=torch.int32, device="cuda")
    back = torch.zeros(words, dtype=torch.int32, pin_memory=True)
    copy_page_locked(device, there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_page_locked(device, there)
        device.add_(1)
        copy_page_locked(back, device)
    for seed in range(20):
        there.copy_(torch.randint(0, 2**30, (words,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(back, there + 1)
