"""Sampling as Triton kernels: no sort, no wait for the host, the same draw at every batch size.

The vocabulary is cut into tiles. In each, groups of neighbouring tokens run the exponential race that the Gumbel-max
trick is the logarithm of: the least E / probability wins, where E is standard exponential and the probability that of
all tokens of the group. A second kernel compares the winners of the tiles, and the tokens of the group that wins run a
race of their own. Rows with filters first get a cut-off that their tokens must reach, from
`kernels.sampling_cutoff_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_cutoff_triton import find_cutoffs
from kernels.sampling_settings import SamplingSettings
from kernels.sampling_tiles_triton import GROUP, LOG2_E, MIN_TEMPERATURE, load_tile

_TILE = 2048
"""Tokens of one program. It is the same for every batch, so that a draw does not depend on the other rows."""
_WARPS = 1
"""No reduction has to leave the warp."""
_PAIRS = 128
"""Suppressed tokens of one program."""

_NOTHING = tl.constexpr(2**31 - 1)


def sample_tokens_triton(
    logits: Tensor, settings: SamplingSettings, *, out: Tensor, places: Tensor | None = None
) -> None:
    """As `kernels.sampling.sample_tokens`, for CUDA tensors (CPU tensors under Triton's interpreter)."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    _suppress(logits, settings.suppressed)
    cutoffs = find_cutoffs(logits, settings) if settings.filtered else None
    tiles = triton.cdiv(vocab, _TILE)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    time = torch.empty_like(best)
    winner = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    lowest = torch.finfo(logits.dtype).min
    _race_kernel[(rows * tiles,)](
        best, time, winner, logits, settings.temperature, settings.keys, cutoffs, vocab, tiles, logits.stride(0),
        LOWEST=lowest, TILE=_TILE, num_warps=_WARPS,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        out, places, best, time, winner, logits, settings.temperature, settings.keys, cutoffs, vocab, tiles,
        logits.stride(0), LOWEST=lowest, PADDED_TILES=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip


def _suppress(logits: Tensor, suppressed: Tensor) -> None:
    """Give suppressed tokens the lowest finite logit, which is never drawn. One that is not finite stays as it is."""
    pairs = suppressed.shape[0]
    if pairs == 0:
        return
    _suppress_kernel[(triton.cdiv(pairs, _PAIRS),)](
        logits,
        suppressed,
        pairs,
        *logits.shape,
        logits.stride(0),
        LOWEST=torch.finfo(logits.dtype).min,
        PAIRS=_PAIRS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["pairs", "rows"], do_not_specialize_on_alignment=["suppressed"])
def _suppress_kernel(
    logits: tl.tensor,
    suppressed: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    LOWEST: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row = tl.load(suppressed + 2 * pair, mask=pair < pairs, other=-1)
    token = tl.load(suppressed + 2 * pair + 1, mask=pair < pairs, other=-1)
    inside = (row >= 0) & (row < rows) & (token >= 0) & (token < vocab)
    place = logits + row.to(tl.int64) * row_stride + token
    logit = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, LOWEST, mask=inside & (tl.abs(logit) < float("inf")))


@triton.jit(do_not_specialize_on_alignment=["temperature", "keys"])
def _race_kernel(
    best: tl.tensor,
    time: tl.tensor,
    winner: tl.tensor,
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    cutoffs: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    row_stride: tl.tensor,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The race of one tile of one row: its greatest logit, and the time and number of the group that wins.

    Times count relative to the greatest logit of the tile, so that no temperature overflows. The group is -1 where
    a logit is not finite; that of a greedy row holds the greatest logit. `cutoffs` is None if no row has one.
    """
    program = tl.program_id(0)
    row = program // tiles
    start = program % tiles * TILE
    logit = load_tile(logits + row.to(tl.int64) * row_stride, start, vocab, LOWEST, TILE)
    heat = tl.load(temperature + row)
    finite = tl.sum(logit * 0.0) == 0.0
    greatest = tl.max(logit)
    group = start // GROUP + tl.arange(0, TILE // GROUP)
    cutoff = float("-inf")
    if cutoffs is not None:
        cutoff = tl.load(cutoffs + row)
    if (heat > 0.0) & (greatest >= cutoff):
        rate = LOG2_E / tl.maximum(heat, MIN_TEMPERATURE)
        weight = tl.exp2((logit - greatest) * rate)
        if cutoffs is not None:
            weight = tl.where(logit >= cutoff, weight, 0.0)
        noise = _exponential(~group, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
        race = noise / tl.sum(tl.reshape(weight, (TILE // GROUP, GROUP)), 1)
    else:
        race = greatest - tl.max(tl.reshape(logit, (TILE // GROUP, GROUP)), 1)
    least = tl.min(race)
    first = tl.min(tl.where(race == least, group, _NOTHING))
    tl.store(best + program, greatest)
    tl.store(time + program, tl.where(greatest >= cutoff, least, float("inf")))
    tl.store(winner + program, tl.where(finite, first, -1))


@triton.jit(do_not_specialize_on_alignment=["out", "places", "temperature", "keys"])
def _finish_kernel(
    out: tl.tensor,
    places: tl.tensor,
    best: tl.tensor,
    time: tl.tensor,
    winner: tl.tensor,
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    cutoffs: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    row_stride: tl.tensor,
    LOWEST: tl.constexpr,
    PADDED_TILES: tl.constexpr,
) -> None:
    """The winner among the tiles of one row and then among its group's tokens; -1 if a logit is not finite."""
    row = tl.program_id(0)
    tile = tl.arange(0, PADDED_TILES)
    place = row * tiles + tile
    greatest = tl.load(best + place, mask=tile < tiles, other=float("-inf"))
    group = tl.load(winner + place, mask=tile < tiles, other=_NOTHING)
    least = tl.load(time + place, mask=tile < tiles, other=float("inf"))
    heat = tl.load(temperature + row)
    score = (greatest - tl.max(greatest)) / tl.maximum(heat, MIN_TEMPERATURE)
    if heat > 0.0:
        score -= tl.log(least)
    finite = tl.min(group) >= 0
    first = tl.min(tl.where((score == tl.max(score)) & finite, group, _NOTHING))

    # A row without a group to be drawn takes the last one.
    start = tl.minimum(first, (vocab - 1) // GROUP) * GROUP
    token = start + tl.arange(0, GROUP)
    logit = load_tile(logits + row.to(tl.int64) * row_stride, start, vocab, LOWEST, GROUP)
    race = tl.max(logit) - logit
    if heat > 0.0:
        race = tl.exp2(race * (LOG2_E / tl.maximum(heat, MIN_TEMPERATURE)))
        race *= _exponential(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
        if cutoffs is not None:
            race = tl.where(logit >= tl.load(cutoffs + row), race, float("inf"))
    chosen = tl.min(tl.where(race == tl.min(race), token, _NOTHING))
    to = row if places is None else tl.load(places + row)
    # Where all tokens are suppressed, one beyond the vocabulary may have won.
    tl.store(out + to, tl.where(finite, tl.minimum(chosen, vocab - 1), -1))


@triton.jit
def _exponential(ids: tl.tensor, first_key: tl.tensor, second_key: tl.tensor) -> tl.tensor:
    """Standard exponential noise of each id; minus its logarithm is `kernels.sampling_torch.gumbel_noise`.

    As shifts distribute over xor, the keys are shifted alone, and what ends the first lowbias32 and what begins
    the second cancel: (x ^ x >> 16 ^ key) ^ (x ^ x >> 16 ^ key) >> 16 = x ^ key ^ key >> 16.
    """
    first = first_key.to(tl.uint32, bitcast=True)
    second = second_key.to(tl.uint32, bitcast=True)
    bits = ids.to(tl.uint32) * 0x9E3779B9
    bits = _multiply_twice(bits ^ (bits >> 16) ^ (first ^ (first >> 16)))
    bits = _multiply_twice(bits ^ (second ^ (second >> 16)))
    uniform = (bits ^ (bits >> 16)).to(tl.float32) * 2.0**-32
    return _minus_log1p_minus(tl.minimum(tl.maximum(uniform, 2.0**-33), 1 - 2.0**-24))


@triton.jit
def _multiply_twice(bits: tl.tensor) -> tl.tensor:
    """lowbias32 without its first and last steps."""
    bits *= 0x7FEB352D
    return (bits ^ (bits >> 15)) * 0x846CA68B


@triton.jit
def _minus_log1p_minus(u: tl.tensor) -> tl.tensor:
    """-log(1 - u) for u of (0, 1), with a relative error of 2e-7 (`tl.log` is inexact near 1, and slower).

    1 - u is 2**e * (1 + f) with |f| <= 1/3, and log(1 + f) = f + f**2 * Q(f), where Q is a fit of least greatest
    relative error. Where e is 0, f is -u, without the rounding of 1 - u.
    """
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # e * 2**23; 0x3F2AAAAB is 2 / 3
    f = tl.where(exponent == 0, -u, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    q = 0.1402634382 * f - 0.1538854241
    q = q * f + 0.1399580985
    q = q * f - 0.1641595960
    q = q * f + 0.2001116872
    q = q * f - 0.2500782013
    q = q * f + 0.3333319724
    q = q * f - 0.4999993742
    return -(exponent.to(tl.float32) * (0.6931471806 * 2.0**-23)) - (f * f * q + f)
