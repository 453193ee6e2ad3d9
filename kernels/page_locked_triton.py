"""Copies between a GPU and page-locked memory of the host by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024
"""Of one program, four bytes each: two accesses of 16 bytes for each thread."""


def copy_page_locked_triton(target: Tensor, source: Tensor) -> None:
    """As `kernels.page_locked.copy_page_locked`, for a GPU (CPU tensors under Triton's interpreter)."""
    words = target.numel() * target.element_size() // 4
    if words:
        _copy_kernel[(triton.cdiv(words, _WORDS),)](
            target.view(-1).view(torch.int32), source.view(-1).view(torch.int32), words, WORDS=_WORDS, num_warps=4
        )


# The number of words changes from step to step: specialised on, it would compile the kernel again.
@triton.jit(do_not_specialize=["words"])
def _copy_kernel(target: tl.tensor, source: tl.tensor, words: tl.tensor, WORDS: tl.constexpr) -> None:
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)
