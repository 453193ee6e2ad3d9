"""What a step does before its first layer: it changes the block tables and looks its tokens up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def start_step(
    token_ids: Tensor,
    last_tokens: Tensor,
    embedding: Tensor,
    block_tables: Tensor,
    changed_places: Tensor,
    changed_blocks: Tensor,
) -> Tensor:
    """Write the changed blocks into the tables and return the tokens' embeddings, [tokens, hidden].

    CUDA tensors are computed by a Triton kernel, CPU tensors by torch.

    Args:
        token_ids: int32 [tokens]; `-1 - slot` stands for the last token of that slot.
        last_tokens: int32 [slots]; a negative one, of a row that failed, is taken for token 0.
        embedding: [vocab, hidden], contiguous.
        block_tables: int32, contiguous.
        changed_places: int64 [changes], into the flattened tables. Where one occurs twice, either block may stay.
        changed_blocks: int32 [changes].

    Raises:
        ValueError: on a GPU, an embedding or tables that are not contiguous.
    """
    if embedding.is_cuda:
        from kernels.step_start_triton import start_step_triton  # Triton is not there without a GPU platform.

        return start_step_triton(token_ids, last_tokens, embedding, block_tables, changed_places, changed_blocks)
    block_tables.view(-1)[changed_places] = changed_blocks
    last = last_tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0)
    return F.embedding(torch.where(token_ids < 0, last, token_ids), embedding)
