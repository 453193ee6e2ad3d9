"""Choosing the next token from logits, greedily or with noise that depends on nothing but the row's own identity."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Draw one token per row from `logits` float32 [rows, vocab], which is overwritten.

    Returns token ids int64 [rows] and failed bool [rows]: rows whose logits are not finite, with an
    arbitrary id. Temperature comes first, then top-k, top-p and min-p, as in transformers. The draw is
    the Gumbel-max trick: the noise of a token depends on (seed, draw id, sample, position, token id)
    alone, so that batch, order and preemption cannot change it.
    """
    low, high = torch.aminmax(logits, dim=-1)
    failed = ~(torch.isfinite(low) & torch.isfinite(high))
    suppressed = batch.suppressed[batch.suppressed[:, 1] < logits.shape[1]]
    if len(suppressed):
        pairs = torch.from_numpy(suppressed).to(logits.device)
        logits[pairs[:, 0], pairs[:, 1]] = -torch.inf
    random = np.flatnonzero(batch.temperature > 0)
    if len(random):
        _perturb(logits, random, batch)
    return logits.argmax(dim=-1), failed


def _perturb(logits: Tensor, rows: npt.NDArray[np.int64], batch: SamplingBatch) -> None:
    """Replace `rows` of the logits by filtered log-probabilities plus noise, whose maximum is a fair draw."""
    device = logits.device
    everything = len(rows) == len(logits)
    at = torch.from_numpy(rows).to(device)
    chosen = logits if everything else logits[at]
    chosen -= chosen.amax(
        dim=-1, keepdim=True
    )  # a tiny temperature may drive the others to -inf, never the best to inf
    chosen /= torch.from_numpy(batch.temperature[rows])[:, None].to(device)
    _filter_by_rank(chosen, batch.top_k[rows], batch.top_p[rows])
    _filter_by_share(chosen, batch.min_p[rows])
    chosen += gumbel_noise(noise_keys(batch, rows), chosen.shape[1], device)
    if not everything:
        logits[at] = chosen


def _filter_by_rank(logits: Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]) -> None:
    """Keep the `top_k` best tokens, and of them the fewest that hold `top_p` of the probability; in place."""
    vocab = logits.shape[1]
    limited = np.flatnonzero(((top_k > 0) & (top_k < vocab)) | (top_p < 1))
    if not len(limited):
        return
    rows = torch.from_numpy(limited).to(logits.device)
    ranked = logits[rows].sort(dim=-1, descending=True).values
    count = torch.from_numpy(np.where(top_k[limited] > 0, top_k[limited], vocab)).to(logits.device)
    beyond = torch.arange(vocab, device=logits.device) >= count[:, None]
    probability = ranked.masked_fill(beyond, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # share of the better tokens
    share = torch.from_numpy(top_p[limited]).to(logits.device)
    dropped = beyond | ((before >= share[:, None]) & (share[:, None] < 1))
    dropped[:, 0] = False
    lowest = ranked.masked_fill(dropped, torch.inf).amin(dim=-1, keepdim=True)
    logits[rows] = logits[rows].masked_fill(logits[rows] < lowest, -torch.inf)


def _filter_by_share(logits: Tensor, min_p: npt.NDArray[np.float32]) -> None:
    """Drop tokens less likely than `min_p` times the likeliest; in place."""
    if not np.any(min_p > 0):
        return
    floor = torch.from_numpy(min_p).to(logits.device).log()[:, None]  # -inf where off
    logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + floor, -torch.inf)


def noise_keys(batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Two 32-bit keys for each of `rows`, from (seed, draw id, sample, position); int32 [rows, 2]."""
    key = np.zeros(len(rows), np.uint64)
    for part in (batch.seed, batch.draw_id, batch.sample, batch.position):
        key = _splitmix64(key ^ part[rows].astype(np.uint64))
    return key.view(np.int32).reshape(-1, 2)


def gumbel_noise(keys: npt.NDArray[np.int32], vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise float32 [rows, vocab] from `keys` int32 [rows, 2], a pure function of both.

    A token's 32 random bits come from a counter-based hash: its id and the first key through the
    integer finaliser lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018), then the second
    key through it again. The bits become a uniform number u that is finest near 0, where the
    exponential -log(1 - u) of a winning token lies even in a large vocabulary.
    """
    first, second = torch.from_numpy(keys.copy()).to(device).unbind(dim=1)
    bits = torch.arange(vocab, dtype=torch.int32, device=device) * -1640531527  # odd: golden ratio * 2**32
    bits = _lowbias32(bits ^ first[:, None])
    bits = _lowbias32(bits ^ second[:, None])
    uniform = torch.where(bits < 0, bits + 4294967296.0, bits.float()) * 2.0**-32
    exponential = -torch.log1p(-uniform.clamp_(2.0**-33, 1 - 2.0**-24))
    return exponential.log_().neg_()


def _lowbias32(bits: Tensor) -> Tensor:
    """Mix int32 bits; shifts are logical, so the sign's copies are masked off."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return bits ^ ((bits >> 16) & 0xFFFF)


def _splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 step (Steele, Lea and Flood, 2014); wraps modulo 2**64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
