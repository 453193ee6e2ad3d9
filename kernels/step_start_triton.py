"""The start of a step as one Triton kernel, in place of ten of torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANGES = 128
"""Changes of the block tables that one program makes."""
_ELEMENTS_PER_THREAD = 8
"""Two bytes each, they make one access of 16 bytes."""
_MAX_WARPS = 8


def start_step_triton(
    token_ids: Tensor,
    last_tokens: Tensor,
    embedding: Tensor,
    block_tables: Tensor,
    changed_places: Tensor,
    changed_blocks: Tensor,
) -> Tensor:
    """As `kernels.step_start.start_step`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    for name, tensor in (("embedding", embedding), ("block_tables", block_tables)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")
    tokens, changes, size = len(token_ids), len(changed_places), embedding.shape[1]
    hidden = torch.empty(tokens, size, dtype=embedding.dtype, device=embedding.device)
    padded_size = triton.next_power_of_2(size)
    programs = max(tokens, triton.cdiv(changes, _CHANGES))
    if programs:
        _start_kernel[(programs,)](
            hidden, token_ids, last_tokens, embedding, block_tables, changed_places, changed_blocks, tokens, changes,
            SIZE=size, PADDED_SIZE=padded_size, CHANGES=_CHANGES,
            num_warps=min(_MAX_WARPS, max(1, padded_size // (32 * _ELEMENTS_PER_THREAD))),
        )  # fmt: skip
    return hidden


# Both numbers change from step to step: specialised on, they would compile the kernel again.
@triton.jit(do_not_specialize=["tokens", "changes"])
def _start_kernel(
    hidden: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    embedding: tl.tensor,
    block_tables: tl.tensor,
    changed_places: tl.tensor,
    changed_blocks: tl.tensor,
    tokens: tl.tensor,
    changes: tl.tensor,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    CHANGES: tl.constexpr,
) -> None:
    """One program makes CHANGES changes and looks up one token, as far as there are any."""
    program = tl.program_id(0)
    if program * CHANGES < changes:
        change = program * CHANGES + tl.arange(0, CHANGES)
        place = tl.load(changed_places + change, mask=change < changes, other=0)
        block = tl.load(changed_blocks + change, mask=change < changes, other=0)
        tl.store(block_tables + place, block, mask=change < changes)
    if program < tokens:
        token = tl.load(token_ids + program)
        if token < 0:
            token = tl.maximum(tl.load(last_tokens - 1 - token), 0)
        element = tl.arange(0, PADDED_SIZE)
        values = tl.load(embedding + token.to(tl.int64) * SIZE + element, mask=element < SIZE)
        tl.store(hidden + program.to(tl.int64) * SIZE + element, values, mask=element < SIZE)
