"""Paged attention as a Triton kernel.

The query heads that share a key/value head are packed with several tokens into the rows of a tile (row =
token * group + head), which walks the keys with an online softmax (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class _Tile:
    """Shape of one program's work; sizes are powers of two that fit the 227 KiB of shared memory of an H100."""

    rows: int
    keys: int
    warps: int
    stages: int


_MIN_ROWS = 16
"""Fewest rows of a tensor core product; as many query heads of a key/value head fit into a decode."""
_FLOAT32_TILE = _Tile(rows=_MIN_ROWS, keys=32, warps=4, stages=1)
"""IEEE float32 products have no tensor cores: the operands lie in registers, and a larger tile would spill them."""


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As `kernels.attention.paged_attention`, for CUDA tensors (CPU tensors under Triton's interpreter).

    Decodes and prefill chunks are separate launches, since they want different tiles.

    Raises:
        ValueError: a tensor whose layout the kernel cannot read, or a scale that is not positive.
    """
    _check_layout(query, key_cache, value_cache, batch, scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    padded_dim = triton.next_power_of_2(query.shape[2])
    prefills = batch.num_sequences - batch.num_decodes
    if batch.num_decodes:
        tile = _decode_tile(query.dtype, padded_dim)
        _launch(output, query, key_cache, value_cache, batch, scale, sliding_window, tile, batch.num_decodes, True)
    if prefills:
        group = query.shape[1] // key_cache.shape[2]
        tile = _prefill_tile(query.dtype, padded_dim, batch.max_query_len * group)
        # Every sequence fills its tiles but the last: an upper bound that needs no look at the lengths.
        tiles = (query.shape[0] - batch.num_decodes) // (tile.rows // group) + prefills
        _launch(output, query, key_cache, value_cache, batch, scale, sliding_window, tile, tiles, False)
    return output


def _decode_tile(dtype: torch.dtype, padded_dim: int) -> _Tile:
    if dtype == torch.float32:
        return _FLOAT32_TILE
    return _Tile(rows=_MIN_ROWS, keys=128 if padded_dim <= 128 else 64, warps=4, stages=2)


def _prefill_tile(dtype: torch.dtype, padded_dim: int, longest: int) -> _Tile:
    """`longest` is the number of rows of the longest chunk: short chunks get tiles with fewer spare rows."""
    if dtype == torch.float32:
        return _FLOAT32_TILE
    if padded_dim > 128:
        return _Tile(rows=128, keys=64, warps=8, stages=2)
    rows = min(256, max(64, triton.next_power_of_2(longest)))
    return _Tile(rows=rows, keys=64, warps=4 if rows == 64 else 8, stages=3)


def _launch(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    tile: _Tile,
    tiles: int,
    decode: bool,
) -> None:
    num_kv_heads, head_dim = key_cache.shape[2:]
    _attention_kernel[(tiles * num_kv_heads,)](
        output,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        scale * math.log2(math.e),
        batch.num_decodes,
        batch.num_sequences,
        output.stride(0),
        query.stride(0),
        batch.block_tables.stride(0),
        *key_cache.stride()[:3],
        KV_HEADS=num_kv_heads,
        GROUP=query.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=key_cache.shape[1],
        WINDOW=sliding_window or 0,
        DECODE=decode,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def _check_layout(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float) -> None:
    if query.stride()[1:] != (query.shape[2], 1):
        raise ValueError(f"query has strides {query.stride()}: heads and head_dim must be contiguous")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache has strides {key_cache.stride()}, value_cache {value_cache.stride()}: "
            "they must be equal, and head_dim contiguous"
        )
    if batch.block_tables.stride(1) != 1:
        raise ValueError(f"block_tables has strides {batch.block_tables.stride()}: its rows must be contiguous")
    if scale <= 0:
        raise ValueError(f"softmax scale {scale}: must be positive")


# Lengths and counts change from step to step: specialised on, they would compile the kernel again.
@triton.jit(do_not_specialize=["num_decodes", "num_sequences", "table_stride"])
def _attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    scale: tl.tensor,
    num_decodes: tl.tensor,
    num_sequences: tl.tensor,
    output_stride: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program computes one tile of queries of one key/value head. `scale` includes log2(e); WINDOW 0 is none.

    Neighbouring programs share a tile's sequence. The tiles of the longest contexts tend to come last in a
    batch; they start first, so that short ones fill the gaps at the end.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    if DECODE:
        sequence = tl.program_id(0) // KV_HEADS
        first_token = 0
    else:
        tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
        sequence = _find_sequence(query_start, tile, num_decodes, num_sequences, TOKENS)
        first_token = (tile - _first_tile(query_start, sequence, num_decodes, TOKENS)) * TOKENS
    query_begin = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - query_begin
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens + sequence)
    first_position = context_len - query_len + first_token
    last_position = tl.minimum(first_position + TOKENS, context_len) - 1

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP
    position = first_position + row // GROUP
    inside = ((row < TOKENS * GROUP) & (token < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    index = (query_begin + token).to(tl.int64)[:, None]
    element = ((kv_head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(query + index * query_stride + element, mask=inside, other=0.0)

    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = key_cache + kv_head * head_stride
    values = value_cache + kv_head * head_stride
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)

    # Tiles of keys before `whole_from` may hold some that have left a row's window, tiles from `whole_until`
    # on some that come after a row's position or are not written. All bounds but `end` are multiples of KEYS.
    end = last_position + 1
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
        whole_from = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), KEYS) * KEYS
    else:
        start = 0
        whole_from = 0
    if DECODE:
        # Masks are cheap with so few rows; one loop keeps the loads in flight up to the last key.
        for at in tl.range(start, end, KEYS, num_stages=STAGES):
            maximum, total, mixed = _attend_tile(
                maximum, total, mixed, queries, keys, values, table, position, at, end, scale,
                block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, KEYS, True,
            )  # fmt: skip
    else:
        whole_until = (first_position + 1) // KEYS * KEYS
        if WINDOW > 0:
            for at in tl.range(start, tl.minimum(whole_from, end), KEYS, num_stages=1):
                maximum, total, mixed = _attend_tile(
                    maximum, total, mixed, queries, keys, values, table, position, at, end, scale,
                    block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, KEYS, True,
                )  # fmt: skip
        for at in tl.range(whole_from, whole_until, KEYS, num_stages=STAGES):
            maximum, total, mixed = _attend_tile(
                maximum, total, mixed, queries, keys, values, table, position, at, end, scale,
                block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, KEYS, False,
            )  # fmt: skip
        for at in tl.range(tl.maximum(whole_from, whole_until), end, KEYS, num_stages=1):
            maximum, total, mixed = _attend_tile(
                maximum, total, mixed, queries, keys, values, table, position, at, end, scale,
                block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, KEYS, True,
            )  # fmt: skip

    result = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + index * output_stride + element, result, mask=inside)


@triton.jit
def _first_tile(query_start: tl.tensor, sequence: tl.tensor, num_decodes: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """First tile of a sequence among those of the prefill chunks; each has one spare tile for its last tokens."""
    return (tl.load(query_start + sequence) - num_decodes) // TOKENS + sequence - num_decodes


@triton.jit
def _find_sequence(
    query_start: tl.tensor, tile: tl.tensor, num_decodes: tl.tensor, num_sequences: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = num_decodes
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        reached = _first_tile(query_start, middle, num_decodes, TOKENS) <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _attend_tile(
    maximum: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the keys from `start` on into the running maximum, sum and mixed values of every row.

    Where MASKED, keys that a row at `position` does not see are left out, and slots from `end` on (which may
    hold NaN, under table entries that may be out of range) are not read. `start` is a multiple of KEYS; as
    KEYS and BLOCK_SIZE are powers of two, block and offset are sums of a loop-invariant part and a scalar.
    """
    key = tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_DIM)
    written = start + key < end
    entry = table + start // BLOCK_SIZE + key // BLOCK_SIZE
    block = tl.load(entry, mask=written, other=0) if MASKED else tl.load(entry)
    slot = block.to(tl.int64) * block_stride + (start % BLOCK_SIZE + key % BLOCK_SIZE) * slot_stride
    element = slot[:, None] + dim[None, :]
    if MASKED:
        inside = written[:, None] & (dim < HEAD_DIM)[None, :]
        key_rows = tl.load(keys + element, mask=inside, other=0.0)
        value_rows = tl.load(values + element, mask=inside, other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        inside = (dim < HEAD_DIM)[None, :]
        key_rows = tl.load(keys + element, mask=inside, other=0.0)
        value_rows = tl.load(values + element, mask=inside, other=0.0)
    else:
        key_rows = tl.load(keys + element)
        value_rows = tl.load(values + element)

    # Float32 products would be TF32 by default.
    scores = tl.dot(queries, tl.trans(key_rows), input_precision="ieee")
    if MASKED:
        distance = position[:, None] - (start + key)[None, :]
        visible = distance >= 0
        if WINDOW > 0:
            visible &= distance < WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # Where MASKED, a row may have seen no key yet; its maximum is -inf, and -inf - -inf would be NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value_rows.dtype), value_rows, mixed * decay[:, None], input_precision="ieee")
    return new_maximum, total, mixed
