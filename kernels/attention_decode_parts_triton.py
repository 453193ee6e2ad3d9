"""Partial results of sequences whose keys are cut over several programs, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_line import share_owner


@triton.jit
def leave_part(
    parts: tl.tensor,
    place: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A part is mixed values [GROUP, PADDED_DIM], then maxima [GROUP], then sums [GROUP]."""
    row = tl.arange(0, ROWS)
    inside = row < GROUP
    part = parts + place * (GROUP * (PADDED_DIM + 2))
    tl.store(part + row[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :], mixed, mask=inside[:, None])
    tl.store(part + GROUP * PADDED_DIM + row, maximum, mask=inside)
    tl.store(part + GROUP * PADDED_DIM + GROUP + row, total, mask=inside)


@triton.jit
def arrive(
    output: tl.tensor,
    arrivals: tl.tensor,
    parts: tl.tensor,
    segment: tl.tensor,
    tiles: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    quotient: tl.tensor,
    remainder: tl.tensor,
    output_stride: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
) -> None:
    """Count a part of the cut segment that starts at tile `segment` of the line, and merge all if it was the last."""
    first = share_owner(segment, quotient, remainder)
    last = share_owner(segment + tiles - 1, quotient, remainder)
    arrived = tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        tl.store(arrivals + first, 0)
        result = _merge(parts, first, last, GROUP, PADDED_GROUP, PADDED_DIM, MERGED_PARTS)
        row = tl.arange(0, PADDED_GROUP)
        dim = tl.arange(0, PADDED_DIM)
        inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        to = output + token.to(tl.int64) * output_stride + head * (GROUP * HEAD_DIM)
        tl.store(
            to + row[:, None] * HEAD_DIM + dim[None, :],
            result.to(output.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _merge(
    parts: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
) -> tl.tensor:
    """Attention of a segment from the parts that programs `first` to `last` left, [PADDED_GROUP, PADDED_DIM].

    Parts are read past the first-level cache, which does not see what other multiprocessors write.
    """
    row = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    maximum = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    mixed = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    for at in tl.range(first, last + 1, MERGED_PARTS, num_stages=1):
        program = at + tl.arange(0, MERGED_PARTS)
        inside = (program <= last)[:, None] & (row < GROUP)[None, :]
        place = 2 * program + (program == first).to(tl.int32)
        part = parts + place[:, None] * (GROUP * (PADDED_DIM + 2))
        statistics = part + GROUP * PADDED_DIM + row[None, :]
        maxima = tl.load(statistics, mask=inside, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(statistics + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
        element = (part + row[None, :] * PADDED_DIM)[:, :, None] + dim[None, None, :]
        values = tl.load(element, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        # Spare rows have seen nothing, and -inf - -inf would be NaN.
        shift = tl.where(row < GROUP, new_maximum, 0.0)
        weights = tl.exp2(maxima - shift[None, :])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(totals * weights, 0)
        mixed = mixed * decay[:, None] + tl.sum(values * weights[:, :, None], 0)
        maximum = new_maximum
    return mixed / total[:, None]
