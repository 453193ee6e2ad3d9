"""The least logit that top-k, top-p and min-p keep of each row, without sorting, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_settings import SamplingSettings
from kernels.sampling_tiles_triton import LOG2_E, MIN_TEMPERATURE, load_tile

_TILE = 8192
"""Lanes of a program, 16 for each thread."""
_WARPS = 16
_CAPACITY = 32768
"""Candidates of a row that are gathered; at least a tile. Rows with more of them, nearly flat ones, are read whole."""


def find_cutoffs(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """float32 [rows]: the least logit that a row's filters keep; the lowest finite one for rows that keep all.

    Rows whose logits are not finite get any value.
    """
    rows, vocab = logits.shape
    cutoffs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    scratch = torch.empty(rows, _CAPACITY, dtype=logits.dtype, device=logits.device)
    _cutoff_kernel[(rows,)](
        cutoffs,
        logits,
        scratch,
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.min_p,
        vocab,
        logits.stride(0),
        LOWEST=torch.finfo(logits.dtype).min,
        TILE=_TILE,
        CAPACITY=_CAPACITY,
        num_warps=_WARPS,
    )
    return cutoffs


# A vocabulary of 1 would be a constant, and of another type than the number of candidates.
@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["temperature", "top_p", "top_k", "min_p"])
def _cutoff_kernel(
    cutoffs: tl.tensor,
    logits: tl.tensor,
    scratch: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    min_p: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """One program finds the cut-off of one row.

    A lane takes every TILE-th logit. What the greatest logits of the lanes hold is held by all logits, too: where
    k of them, or of them top_p of the probability, reach a value, the cut-off is not below. Only lanes that reach
    this floor have candidates for the cut-off, which are few unless the row is nearly flat.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    p = tl.load(top_p + row)
    k = tl.load(top_k + row)
    share = tl.load(min_p + row)
    ranked = (k > 0) & (k < vocab)
    if (heat == 0.0) | ((not ranked) & (p >= 1.0) & (share == 0.0)):
        tl.store(cutoffs + row, LOWEST)
        return
    heat = tl.maximum(heat, MIN_TEMPERATURE)
    rate = LOG2_E / heat
    source = logits + row * row_stride
    buffer = scratch + row * CAPACITY

    lanes, total = _scan(source, vocab, rate, LOWEST, TILE)
    greatest = tl.max(lanes)
    cutoff = LOWEST
    if share > 0.0:
        cutoff = greatest + heat * tl.log(share)
    if ranked | (p < 1.0):
        tl.store(buffer + tl.arange(0, TILE), lanes.to(dtype))
        tl.debug_barrier()
        below = _key(tl.min(lanes), dtype) - 1
        high = _key(greatest, dtype) + 1
        if ranked:
            low = _search(buffer, TILE, below, high, k.to(tl.float32), greatest, rate, LOWEST, TILE, False)
        else:
            low = _search(buffer, TILE, below, high, p * total, greatest, rate, LOWEST, TILE, True)
        floor = tl.where(low > below, _value(low, dtype), LOWEST)

        candidates = buffer
        count = _gather_lanes(buffer, source, vocab, floor, LOWEST, TILE, CAPACITY)
        if count == 0:
            candidates = source
            count = vocab
        low = _key(floor, dtype) - 1
        if ranked:
            low = _search(candidates, count, low, high, k.to(tl.float32), greatest, rate, LOWEST, TILE, False)
            least = _value(low, dtype)
            total, _, _ = _weights(candidates, count, least, least, least, greatest, rate, LOWEST, TILE, True)
        if p < 1.0:
            low = _search(candidates, count, low, high, p * total, greatest, rate, LOWEST, TILE, True)
        cutoff = tl.maximum(cutoff, _value(low, dtype))
    tl.store(cutoffs + row, cutoff)


@triton.jit
def _scan(
    source: tl.tensor, vocab: tl.tensor, rate: tl.tensor, LOWEST: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The greatest logit of each lane, and the weight of all logits relative to the greatest of all."""
    lanes = tl.full((TILE,), LOWEST, tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, vocab, TILE):
        logit = load_tile(source, start, vocab, LOWEST, TILE)
        change = tl.exp2(-tl.abs(logit - lanes) * rate)
        weight = tl.where(logit > lanes, weight * change + 1.0, weight + change)
        lanes = tl.maximum(lanes, logit)
    return lanes, tl.sum(weight * tl.exp2((lanes - tl.max(lanes)) * rate))


@triton.jit
def _gather_lanes(
    buffer: tl.tensor,
    source: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> tl.tensor:
    """Replace the lanes' maxima in `buffer` by all logits of the lanes that reach `floor`, and return their number.

    It is 0 if they are more than CAPACITY, and are not gathered.
    """
    lane = tl.arange(0, TILE)
    reaching = tl.load(buffer + lane) >= floor
    steps = tl.cdiv(vocab, TILE)
    count = tl.sum(reaching.to(tl.int32)) * steps
    tl.debug_barrier()
    if count <= CAPACITY:
        place = buffer + (tl.cumsum(reaching.to(tl.int32)) - 1) * steps
        for step in tl.range(0, steps):
            token = step * TILE + lane
            logit = tl.load(source + token, mask=reaching & (token < vocab), other=LOWEST)
            tl.store(place + step, logit, mask=reaching)
        tl.debug_barrier()
    else:
        count = 0
    return count


@triton.jit
def _search(
    source: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    greatest: tl.tensor,
    rate: tl.tensor,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
    PROBABILITY: tl.constexpr,
) -> tl.tensor:
    """The last key of [low, high) whose value leaves at least `target` weight at or above it; `low` is taken to do so.

    Each pass quarters the range.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    while high - low > 1:
        step = (high - low + 3) // 4
        first = _value(low + step, dtype)
        second = _value(low + 2 * step, dtype)
        third = _value(low + 3 * step, dtype)
        above, further, furthest = _weights(
            source, count, first, second, third, greatest, rate, LOWEST, TILE, PROBABILITY
        )
        passed = (above >= target).to(tl.int64) + (further >= target).to(tl.int64) + (furthest >= target).to(tl.int64)
        end = low + (passed + 1) * step
        low = tl.minimum(low + passed * step, high - 1)
        high = tl.minimum(end, high)
    return low


@triton.jit
def _weights(
    source: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    greatest: tl.tensor,
    rate: tl.tensor,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
    PROBABILITY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights of the logits at or above each pivot: their unnormalised probability, or else their number."""
    above = tl.zeros((TILE,), tl.float32)
    further = tl.zeros((TILE,), tl.float32)
    furthest = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, count, TILE):
        logit = load_tile(source, start, count, LOWEST, TILE)
        weight = tl.exp2((logit - greatest) * rate) if PROBABILITY else tl.full((TILE,), 1.0, tl.float32)
        above += tl.where(logit >= first, weight, 0.0)
        further += tl.where(logit >= second, weight, 0.0)
        furthest += tl.where(logit >= third, weight, 0.0)
    return tl.sum(above), tl.sum(further), tl.sum(furthest)


@triton.jit
def _key(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The int64 place of a float32 among the values of `dtype`: in their order, without gaps."""
    if dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    else:
        half = value.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(half < 0, half ^ 0x7FFF, half)
    return key.to(tl.int64)


@triton.jit
def _value(key: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The float32 at a place that `_key` gives."""
    if dtype == tl.float32:
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
        value = bits.to(tl.float32, bitcast=True)
    else:
        half = tl.where(key < 0, key ^ 0x7FFF, key).to(tl.int16)
        value = half.to(dtype, bitcast=True).to(tl.float32)
    return value
