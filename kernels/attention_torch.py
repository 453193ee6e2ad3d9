"""Paged attention in torch, for CPU runs.

The queries of a step are cut into pieces, and pieces of similar size are computed together, padded to a
common size: few calls on large tensors, which is what torch is fast at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention_batch import AttentionBatch

_GATHER_BYTES = 8 << 20
"""Keys and values gathered for one slice: little enough to stay in a CPU's last-level cache."""
_PIECE_QUERIES = 128
"""Most queries of a piece: bounds the mask, and spares most of the keys that come after the queries."""
_NEVER_SEEN = torch.iinfo(torch.int32).max
"""Position of a gathered slot that holds no key of the piece."""


@dataclass(frozen=True)
class _Pieces:
    """Runs of query tokens, each within one sequence; int64 [pieces] each."""

    table_row: Tensor
    first_token: Tensor
    queries: Tensor
    position: Tensor
    """Of the first query."""
    first_block: Tensor
    """Of those that the queries see, counted along the block table."""
    blocks: Tensor

    def take(self, index: list[int]) -> _Pieces:
        return _Pieces(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class _Slice:
    """Pieces that are computed together: `n` of them, padded to `queries` tokens and `keys` gathered slots."""

    tokens: Tensor
    """int64 [n * queries]: the query tokens; padding repeats the last token of a piece."""
    kept: Tensor
    """int64 [real queries]: indices into `tokens` without the padding."""
    query_position: Tensor
    """int32 [n, queries]."""
    key_position: Tensor
    """int32 [n, keys]."""
    blocks: Tensor
    """int32 [keys / block_size * n]: block ids to gather; padding repeats a block of the same piece."""
    hidden_slots: Tensor
    """int64 [hidden]: gathered slots that no query sees. They may hold NaN, which no mask stops."""


@dataclass(frozen=True)
class _Plan:
    slices: tuple[_Slice, ...]
    scratch: tuple[Tensor, Tensor]
    """Gathered keys and values, [blocks, block_size, kv_heads, head_dim]. Kept, as fresh memory costs page faults."""


def paged_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As `kernels.attention.paged_attention`, for CPU tensors. `batch` must not be written to after its first use."""
    output = torch.empty(query.shape, dtype=query.dtype)
    key = ("torch", sliding_window, key_cache.shape[1:], key_cache.dtype)
    if key not in batch.plans:
        batch.plans[key] = _plan(batch, sliding_window, key_cache.shape[1:], key_cache.dtype)
    plan: _Plan = batch.plans[key]
    for part in plan.slices:
        keys = _gather(key_cache, part, plan.scratch[0])
        values = _gather(value_cache, part, plan.scratch[1])
        _attend(output, query, keys, values, part, scale, sliding_window)
    return output


def _gather(cache: Tensor, part: _Slice, scratch: Tensor) -> Tensor:
    """[n, kv_heads, keys, head_dim] in `scratch`, with zeros in the hidden slots."""
    gathered = torch.index_select(cache, 0, part.blocks, out=scratch[: part.blocks.shape[0]])
    slots = gathered.flatten(0, 1).index_fill_(0, part.hidden_slots, 0)
    return slots.unflatten(0, part.key_position.shape).transpose(1, 2)


def _attend(
    output: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: _Slice,
    scale: float,
    sliding_window: int | None,
) -> None:
    distance = part.query_position[:, None, :, None] - part.key_position[:, None, None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    pieces, num_queries = part.query_position.shape
    rows = query.index_select(0, part.tokens)
    if num_queries == 1:
        # The heads that share keys become the query dimension, so that keys are read once for all of them.
        rows = rows.unflatten(1, (keys.shape[1], -1))
        mixed = scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale).flatten(1, 2)
    else:
        rows = rows.unflatten(0, (pieces, num_queries)).transpose(1, 2)
        mixed = scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(0, 1)
    output.index_copy_(0, part.tokens[part.kept], mixed.index_select(0, part.kept))


def _plan(batch: AttentionBatch, sliding_window: int | None, block_shape: torch.Size, dtype: torch.dtype) -> _Plan:
    block_size = block_shape[0]
    capacity = _GATHER_BYTES // (2 * block_shape.numel() * dtype.itemsize)
    pieces = _cut(batch, sliding_window, block_size)
    slices = tuple(_pad(pieces.take(members), batch.block_tables, block_size) for members in _group(pieces, capacity))
    shape = (max((part.blocks.shape[0] for part in slices), default=0), *block_shape)
    return _Plan(slices, (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)))


def _cut(batch: AttentionBatch, sliding_window: int | None, block_size: int) -> _Pieces:
    query_end = batch.query_start[1:].long()
    query_len = batch.query_start.diff().long()
    pieces = _blocks_of(query_len, _PIECE_QUERIES)
    sequence = torch.arange(batch.num_sequences).repeat_interleave(pieces)
    ordinal = torch.arange(sequence.shape[0]) - (pieces.cumsum(0) - pieces)[sequence]
    first_token = (query_end - query_len)[sequence] + ordinal * _PIECE_QUERIES
    queries = (query_end[sequence] - first_token).clamp(max=_PIECE_QUERIES)
    position = batch.context_lens[sequence] - query_end[sequence] + first_token
    first_seen = (position - (sliding_window or batch.max_context_len) + 1).clamp(min=0)
    first_block = first_seen // block_size
    return _Pieces(
        table_row=batch.table_rows[sequence].long(),
        first_token=first_token,
        queries=queries,
        position=position,
        first_block=first_block,
        blocks=_blocks_of(position + queries, block_size) - first_block,
    )


def _group(pieces: _Pieces, capacity: int) -> Iterator[list[int]]:
    """Indices of pieces to compute together, padding none beyond twice its own size.

    A group has at most `capacity` padded blocks, unless a single piece has more.
    """
    queries, blocks = pieces.queries.tolist(), pieces.blocks.tolist()
    order = sorted(range(len(blocks)), key=lambda piece: (-queries[piece].bit_length(), -blocks[piece]))
    group: list[int] = []
    for piece in order:
        if group:
            first = group[0]
            alike = queries[piece].bit_length() == queries[first].bit_length() and 2 * blocks[piece] >= blocks[first]
            if not alike or (len(group) + 1) * blocks[first] > capacity:
                yield group
                group = []
        group.append(piece)
    if group:
        yield group


def _pad(pieces: _Pieces, block_tables: Tensor, block_size: int) -> _Slice:
    query = torch.arange(int(pieces.queries.max()))
    last_query = pieces.queries[:, None] - 1
    query_offset = torch.minimum(query, last_query)
    column = torch.arange(int(pieces.blocks.max()))
    table_column = pieces.first_block[:, None] + torch.minimum(column, pieces.blocks[:, None] - 1)
    first_slot = (pieces.first_block[:, None] + column) * block_size
    key_position = (first_slot[:, :, None] + torch.arange(block_size)).flatten(1)
    hidden = key_position > pieces.position[:, None] + last_query
    return _Slice(
        tokens=(pieces.first_token[:, None] + query_offset).flatten(),
        kept=(query <= last_query).flatten().nonzero().squeeze(1),
        query_position=(pieces.position[:, None] + query_offset).int(),
        key_position=key_position.masked_fill(hidden, _NEVER_SEEN).int(),
        blocks=block_tables[pieces.table_row[:, None], table_column].flatten(),
        hidden_slots=hidden.flatten().nonzero().squeeze(1),
    )


def _blocks_of(count: Tensor, size: int) -> Tensor:
    return (count + size - 1).div(size, rounding_mode="floor")
