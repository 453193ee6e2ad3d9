"""Steps to start and what comes of them, shared by the CPU and the GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS, WIDTH, VOCAB = 30, 40, 500


def make_start(
    tokens: int, changes: int, size: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Random arguments of `start_step`: about half of the tokens are the last ones of slots, some of which failed."""
    generator = torch.Generator().manual_seed(tokens + changes)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32)

    unread = torch.rand(tokens, generator=generator) < 0.5
    step = {
        "token_ids": torch.where(unread, -1 - integers(0, SLOTS, tokens), integers(0, VOCAB, tokens)),
        "last_tokens": integers(-1, VOCAB, SLOTS),
        "embedding": torch.randn(VOCAB, size, generator=generator).to(dtype),
        "block_tables": integers(0, 1000, SLOTS * WIDTH).unflatten(0, (SLOTS, WIDTH)),
        "changed_places": torch.randperm(SLOTS * WIDTH, generator=generator)[:changes],
        "changed_blocks": integers(0, 1000, changes),
    }
    return {name: tensor.to(device) for name, tensor in step.items()}


def expected_start(
    token_ids: Tensor,
    last_tokens: Tensor,
    embedding: Tensor,
    block_tables: Tensor,
    changed_places: Tensor,
    changed_blocks: Tensor,
) -> tuple[Tensor, Tensor]:
    """The embeddings and the changed tables, element by element."""
    last = last_tokens.tolist()
    tokens = [token if token >= 0 else max(last[-1 - token], 0) for token in token_ids.tolist()]
    tables = block_tables.flatten().tolist()
    for place, block in zip(changed_places.tolist(), changed_blocks.tolist(), strict=True):
        tables[place] = block
    changed = torch.tensor(tables, dtype=torch.int32, device=block_tables.device)
    return embedding[tokens], changed.view(block_tables.shape)
