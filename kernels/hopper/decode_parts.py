"""Partial results of sequences whose keys are cut over several programs.

A part is mixed values [padded_dim, padded_group], then maxima [padded_group], then sums [padded_group], in float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention_line import share_owner
from kernels.hopper.decode_shape import DecodeShape
from kernels.hopper.ring import thread_barrier


def part_size(shape: DecodeShape) -> int:
    """Elements of a part."""
    return int(shape.padded_group.value * (shape.padded_dim.value + 2))


@gluon.jit
def leave_part(
    parts: gl.tensor, at: gl.tensor, maximum: gl.tensor, total: gl.tensor, mixed: gl.tensor, SHAPE: gl.constexpr
) -> None:
    """Write part `at`: `maximum` and `total` [rows], `mixed` [padded_dim, rows]."""
    LAYOUT: gl.constexpr = mixed.type.layout
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, LAYOUT))
    dim = gl.arange(0, SHAPE.padded_dim, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    part = parts + at * (SHAPE.padded_group * (SHAPE.padded_dim + 2))
    statistics = part + SHAPE.padded_dim * SHAPE.padded_group + row
    inside = row < SHAPE.padded_group
    gl.store(part + dim * SHAPE.padded_group + row[None, :], mixed, mask=inside[None, :] & (dim >= 0))
    gl.store(statistics, maximum, mask=inside)
    gl.store(statistics + SHAPE.padded_group, total, mask=inside)


@gluon.jit
def arrive(
    output: gl.tensor,
    arrivals: gl.tensor,
    parts: gl.tensor,
    place: gl.tuple,
    segment: gl.tensor,
    quotient: gl.tensor,
    remainder: gl.tensor,
    output_stride: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Count a part of the cut segment that starts at tile `segment` of the line, and merge all if it was the last."""
    _, _, head, _, tiles, token, _, _ = place
    first = share_owner(segment, quotient, remainder)
    last = share_owner(segment + tiles - 1, quotient, remainder)
    thread_barrier()  # An arrival releases the stores of all threads.
    arrived = gl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        gl.store(arrivals + first, 0)
        to = output + token.to(gl.int64) * output_stride + head * (SHAPE.group * SHAPE.head_dim)
        _merge(to, parts, first, last, SHAPE)


@gluon.jit
def _merge(to: gl.tensor, parts: gl.tensor, first: gl.tensor, last: gl.tensor, SHAPE: gl.constexpr) -> None:
    """Write attention of a segment from the parts that programs `first` to `last` left.

    A thread takes the same elements of all parts, with the statistics of their rows: no data is exchanged, and all
    loads are on their way together. They pass the first-level cache, which does not see what other multiprocessors
    write.
    """
    SIZE: gl.constexpr = SHAPE.padded_dim * SHAPE.padded_group
    LAYOUT: gl.constexpr = gl.BlockedLayout([SHAPE.merged_parts, 4], [1, 32], [1, 4], [1, 0])
    element = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    row = element % SHAPE.padded_group
    dim = element // SHAPE.padded_group
    maximum = gl.full([SIZE], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([SIZE], gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    mixed = gl.zeros([SIZE], gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    for at in range(first, last + 1, SHAPE.merged_parts):
        program = at + gl.arange(0, SHAPE.merged_parts, layout=gl.SliceLayout(1, LAYOUT))
        inside = (program <= last)[:, None] & (element >= 0)[None, :]
        part = 2 * program + (program == first).to(gl.int32)
        values = (parts + part * (SIZE + 2 * SHAPE.padded_group))[:, None] + element[None, :]
        statistics = values + (SIZE - element + row)[None, :]
        mixed_parts = gl.load(values, mask=inside, other=0.0, cache_modifier=".cg")
        maxima = gl.load(statistics, mask=inside, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(statistics + SHAPE.padded_group, mask=inside, other=0.0, cache_modifier=".cg")
        new_maximum = gl.maximum(maximum, gl.max(maxima, 0))
        weights = gl.exp2(maxima - new_maximum[None, :])
        decay = gl.exp2(maximum - new_maximum)
        total = total * decay + gl.sum(totals * weights, 0)
        mixed = mixed * decay + gl.sum(mixed_parts * weights, 0)
        maximum = new_maximum
    result = (mixed / total).to(to.dtype.element_ty)
    gl.store(to + row * SHAPE.head_dim + dim, result, mask=(row < SHAPE.group) & (dim < SHAPE.head_dim))
