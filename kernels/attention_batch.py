"""The layout of one step's tokens over sequences and cache blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's layout, the same for every layer. All tensors lie on the device of the query.

    Sequence `s` owns the query tokens `query_start[s]` to `query_start[s + 1]`. They are the last ones of
    its context, so with `n` query tokens, query `i` stands at position `context_lens[s] - n + i`. Key
    position `p` lies in block `block_tables[table_rows[s], p // block_size]`, at offset `p % block_size`.
    Table entries beyond a sequence's context are never used and may hold anything.

    A captured graph is replayed with other lengths than it was captured with. So the tensors say what is
    computed, and the integers only bound it. Sequences without a query token and with a context of 0 are
    padding; tokens from `query_start[-1]` on are padding, too, and get no output.
    """

    block_tables: Tensor
    """int32 [rows, max_blocks]: block ids."""
    table_rows: Tensor
    """int32 [sequences]: the row of `block_tables` of each sequence."""
    query_start: Tensor
    """int32 [sequences + 1]: cumulative query lengths, from 0."""
    context_lens: Tensor
    """int32 [sequences]: keys of each sequence, its own new tokens included."""
    num_decodes: int
    """At most so many sequences have exactly one query token."""
    max_query_len: int
    """No sequence has more query tokens; 1 if all of them decode."""
    max_context_len: int
    """No sequence has more keys."""
    plans: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What a backend derives from the layout once and uses in every layer. A changed copy starts without."""

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]
