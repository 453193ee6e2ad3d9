"""The layout of one step's tokens over sequences and cache blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's layout, the same for every layer. All tensors lie on the device of the query.

    Sequence `s` owns the query tokens `query_start[s]` to `query_start[s + 1]` (at least one). They are the
    last ones of its context, so with `n` query tokens, query `i` stands at position
    `context_lens[s] - n + i`. Key position `p` lies in block `block_tables[s, p // block_size]`, at offset
    `p % block_size`. Table entries beyond a sequence's context are never used and may hold anything.
    """

    block_tables: Tensor
    """int32 [sequences, max_blocks]: block ids."""
    query_start: Tensor
    """int32 [sequences + 1]: cumulative query lengths, from 0."""
    context_lens: Tensor
    """int32 [sequences]: keys of each sequence, its own new tokens included."""
    num_decodes: int
    """Leading sequences whose query is exactly one token."""
    max_query_len: int
    max_context_len: int

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]
