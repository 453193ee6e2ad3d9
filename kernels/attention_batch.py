"""The layout of one step's tokens over sequences and cache blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

PREFIX_LEVELS = 4
"""Most segments of a sequence: each costs it a partial result that is written and read again."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Ranges of keys that several decodes of a step share and that are read once for all of them.

    A segment is a range of keys that two or more consecutive sequences share: their tables name the same blocks there.
    The segments of a sequence follow one another without a gap from key 0 to `own_start`, the one that most sequences
    share first, and end before its context does. All sequences with segments decode and stand before those that do not
    decode, so that a sequence's query token has the number of the sequence.

    As in `AttentionBatch`, shapes are bounds and values may change between the replays of a captured graph.
    """

    segments: Tensor
    """int32 [capacity, 5]: row of `block_tables`, first sequence, number of sequences, first key, key after the last;
    both keys are multiples of the block size. A segment comes before those that begin where it ends. Rows of zeros are
    padding."""
    own_start: Tensor
    """int32 [sequences]: the keys before it are those of the sequence's segments; 0 without any."""
    own_segments: Tensor
    """int32 [sequences, PREFIX_LEVELS]: the sequence's rows of `segments` in the order of their keys, then -1."""


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
    prefixes: SharedPrefixes | None = None
    """What decodes share, or None to read the keys of each on their own. Ignored with a sliding window."""
    plans: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What a backend derives from the layout once and uses in every layer. A changed copy starts without."""

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]
