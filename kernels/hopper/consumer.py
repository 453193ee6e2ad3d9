"""The warp groups that compute attention from what the producer has gathered in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.item import CONSUMERS, first_key_tile, load_item, num_turns, row_elements
from kernels.hopper.ring import await_ready, release


@gluon.jit
def consume(
    queries: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    output: gl.tensor,
    tiles: gl.tensor,
    num_items: gl.tensor,
    scale: gl.tensor,
    output_stride: gl.tensor,
    consumer: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """Attend with one consumer's share of the rows of every item."""
    DTYPE: gl.constexpr = output.dtype.element_ty
    n = 0
    head, _, query_begin, first_position, tokens = load_item(tiles, 0, num_items, SHAPE)
    for turn in range(num_turns(num_items)):
        next_head, _, next_begin, next_position, next_tokens = load_item(tiles, turn + 1, num_items, SHAPE)
        first_tile = first_key_tile(first_position, SHAPE)
        last = first_position + tokens - 1
        rows_n = turn * CONSUMERS + consumer
        if consumer * SHAPE.tokens < tokens:
            row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, scores_layout(SHAPE)))
            position = first_position + consumer * SHAPE.tokens + row // SHAPE.group
            last_tile = last // SHAPE.keys
            whole_until = gl.minimum((first_position + 1) // SHAPE.keys, last_tile)
            whole_from = first_tile
            if SHAPE.window > 0:
                whole_from = gl.minimum(gl.cdiv(gl.maximum(last - SHAPE.window + 1, 0), SHAPE.keys), whole_until)
            bounds = (first_tile, whole_from, whole_until, last_tile)
            mixed, _maximum, total = attend(queries, rows_n, keys, values, n, position, bounds, scale, DTYPE, SHAPE)
            LAYOUT: gl.constexpr = mixed.type.layout
            result = (mixed / gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))[:, None]).to(DTYPE)
            element, inside = row_elements(head, query_begin, tokens, output_stride, consumer, SHAPE, LAYOUT)
            gl.store(output + element, result, mask=inside)
        else:
            skip(queries, rows_n, keys, values, n, last // SHAPE.keys + 1 - first_tile)
        n += last // SHAPE.keys + 1 - first_tile
        head, query_begin, first_position, tokens = next_head, next_begin, next_position, next_tokens


@gluon.jit
def skip(
    queries: gl.tuple, rows_n: gl.tensor, keys: gl.tuple, values: gl.tuple, n: gl.tensor, key_tiles: gl.tensor
) -> None:
    """Release the fillings of an item that has no rows for this consumer."""
    await_ready(queries, rows_n)
    release(queries, rows_n)
    for filling in range(n, n + key_tiles):
        await_ready(keys, filling)
        release(keys, filling)
        await_ready(values, filling)
        release(values, filling)


@gluon.constexpr_function
def scores_layout(SHAPE: gl.constexpr) -> gl.NVMMADistributedLayout:
    """Layout of the products [rows, keys] of a consumer's queries and a tile of keys."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.keys, 16])


@gluon.jit
def attend(
    queries: gl.tuple,
    rows_n: gl.tensor,
    keys: gl.tuple,
    values: gl.tuple,
    n: gl.tensor,
    position: gl.tensor,
    bounds: gl.tuple,
    scale: gl.tensor,
    DTYPE: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Mixed values [rows, padded_dim] of this consumer's rows of an item, not divided, their maxima and sums [rows].

    The weights of a tile of keys meet their values one step later, while the softmax of the next tile runs.

    Args:
        position: [rows], in the layout of the rows of scores: the last key that each row sees.
        bounds: tiles of keys: the first, the first and the one after the last of those whose keys all rows see, and the
            last one, which comes first.
    """
    SCORES: gl.constexpr = scores_layout(SHAPE)
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.padded_dim, 16])
    first_tile, whole_from, whole_until, last_tile = bounds
    maximum = gl.full([SHAPE.rows], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros([SHAPE.rows], gl.float32, layout=gl.SliceLayout(1, SCORES))
    mixed = gl.zeros([SHAPE.rows, SHAPE.padded_dim], gl.float32, layout=MIXED)

    rows = await_ready(queries, rows_n)
    scores = warpgroup_mma_wait(0, [_start_scores(rows, await_ready(keys, n), SCORES, SHAPE)])
    release(keys, n)
    scores = _mask(scores, position - last_tile * SHAPE.keys, SHAPE)
    weights, _, maximum, total = _softmax(scores, maximum, total, scale, True)
    weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, MIXED, 2))
    for tile in range(last_tile - 1, whole_until - 1, -1):
        n += 1
        weights, mixed, maximum, total = _step(
            rows, keys, values, n, position - tile * SHAPE.keys, weights, mixed, maximum, total, scale, True, SHAPE
        )
    for tile in range(whole_until - 1, whole_from - 1, -1):
        n += 1
        weights, mixed, maximum, total = _step(
            rows, keys, values, n, position - tile * SHAPE.keys, weights, mixed, maximum, total, scale, False, SHAPE
        )
    if SHAPE.window > 0:
        for tile in range(whole_from - 1, first_tile - 1, -1):
            n += 1
            weights, mixed, maximum, total = _step(
                rows, keys, values, n, position - tile * SHAPE.keys, weights, mixed, maximum, total, scale, True, SHAPE
            )
    release(queries, rows_n)
    mixed = warpgroup_mma_wait(0, [_start_mixing(weights, await_ready(values, n), mixed, SHAPE)])
    release(values, n)
    return mixed, maximum, total


@gluon.jit
def _step(
    rows: gl.shared_memory_descriptor,
    keys: gl.tuple,
    values: gl.tuple,
    n: gl.tensor,
    limit: gl.tensor,
    weights: gl.tensor,
    mixed: gl.tensor,
    maximum: gl.tensor,
    total: gl.tensor,
    scale: gl.tensor,
    MASKED: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Mix the values of filling `n - 1` while the weights of the keys of filling `n` are computed."""
    SCORES: gl.constexpr = maximum.type.layout.parent
    scores = _start_scores(rows, await_ready(keys, n), SCORES, SHAPE)
    mixed = _start_mixing(weights, await_ready(values, n - 1), mixed, SHAPE)
    scores = warpgroup_mma_wait(1, [scores])
    release(keys, n)
    if MASKED:
        scores = _mask(scores, limit, SHAPE)
    next_weights, decay, maximum, total = _softmax(scores, maximum, total, scale, MASKED)
    mixed = warpgroup_mma_wait(0, [mixed])
    release(values, n - 1)
    mixed = mixed * gl.convert_layout(decay, gl.SliceLayout(1, mixed.type.layout))[:, None]
    return gl.convert_layout(next_weights.to(weights.dtype), weights.type.layout), mixed, maximum, total


@gluon.jit
def _start_scores(
    rows: gl.shared_memory_descriptor,
    key_rows: gl.shared_memory_descriptor,
    LAYOUT: gl.constexpr,
    SHAPE: gl.constexpr,
) -> gl.tensor:
    """Products [rows, keys] of queries and keys, under way."""
    zeros = gl.zeros([SHAPE.rows, SHAPE.keys], gl.float32, layout=LAYOUT)
    key_columns = key_rows.reshape([SHAPE.keys, SHAPE.padded_dim]).permute([1, 0])
    return warpgroup_mma(rows, key_columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_mixing(
    weights: gl.tensor, value_rows: gl.shared_memory_descriptor, mixed: gl.tensor, SHAPE: gl.constexpr
) -> gl.tensor:
    """`mixed` [rows, padded_dim] with the weighted values added, under way."""
    return warpgroup_mma(weights, value_rows.reshape([SHAPE.keys, SHAPE.padded_dim]), mixed, is_async=True)


@gluon.jit
def _mask(scores: gl.tensor, limit: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """-inf for keys that a row does not see; `limit` is its position, counted from the tile's first key."""
    key = gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(0, scores.type.layout))[None, :]
    visible = key <= limit[:, None]
    if SHAPE.window > 0:
        visible = visible & (key > limit[:, None] - SHAPE.window)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _softmax(
    scores: gl.tensor, maximum: gl.tensor, total: gl.tensor, scale: gl.tensor, MASKED: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Weights of `scores`, the factor of all earlier weights, and each row's new running maximum and sum."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    # Where MASKED, a row may have seen no key yet; its maximum is -inf, and -inf - -inf would be NaN.
    shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = gl.exp2(scores * scale - shift[:, None])
    decay = gl.exp2(maximum - shift)
    return weights, decay, new_maximum, total * decay + gl.sum(weights, 1)
