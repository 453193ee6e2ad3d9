"""Both forms of the copy. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.page_locked import copy_page_locked
from tests.interpreted import interpreted

Copy = Callable[[Tensor, Tensor], None]


@pytest.fixture(params=["torch", "triton"])
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param == "torch":
        return copy_page_locked
    return interpreted("kernels.page_locked_triton").copy_page_locked_triton


@pytest.mark.parametrize("words", [0, 1, 1023, 1024, 5000])
def test_all_bytes_are_copied_and_none_behind_them(copy: Copy, words: int) -> None:
    source = torch.randint(-(2**31), 2**31, (words + 1,), generator=torch.Generator().manual_seed(words)).int()
    target = torch.full((words + 1,), 7, dtype=torch.int32)
    copy(target[:words], source[:words])
    assert torch.equal(target[:words], source[:words])
    assert target[words] == 7


def test_bytes_are_copied_whatever_the_dtypes(copy: Copy) -> None:
    source, target = torch.arange(6, dtype=torch.int64), torch.empty(48, dtype=torch.uint8)
    copy(target, source)
    assert torch.equal(target.view(torch.int64), source)


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        (torch.empty(4), torch.empty(5), "other bytes"),
        (torch.empty(3, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8), "other bytes"),
        (torch.empty(8)[::2], torch.empty(4), "must be contiguous"),
    ],
)
def test_what_cannot_be_copied_is_refused(target: Tensor, source: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_page_locked(target, source)
