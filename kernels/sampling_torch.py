"""Sampling as torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sampling_settings import SamplingSettings

GROUP = 8
"""Neighbouring tokens that share the noise of a draw's first stage. Another number changes what is drawn."""
MIN_TEMPERATURE = 1e-30
"""Lower ones are taken for it, so that their reciprocal stays finite; both draw among the best tokens alone."""


def sample_tokens_torch(
    logits: Tensor, settings: SamplingSettings, *, out: Tensor, places: Tensor | None = None
) -> None:
    """As `kernels.sampling.sample_tokens`, for tensors of any device; sorts, and waits for the host on a GPU."""
    scores = logits.float()
    low, high = torch.aminmax(scores, dim=-1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    _suppress(scores, settings.suppressed)
    drawn = scores.argmax(dim=-1)
    random = (settings.temperature > 0).nonzero().flatten()
    if len(random):
        drawn[random] = _draw(scores[random], settings, random)
    out[slice(None) if places is None else places] = torch.where(finite, drawn, -1).int()


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [rows, ids] from `keys` int32 [rows, 2], a pure function of both.

    `ids` int32, [ids] or [rows, ids], are those of tokens, or `~group` of groups of tokens. An id's 32 random bits
    come from a counter-based hash: the id and the first key through the integer finaliser lowbias32 (C. Wellons,
    "Prospecting for Hash Functions", 2018), then the second key through it again. The bits become a uniform number u
    that is finest near 0, where the exponential -log(1 - u) of a winner lies even in a large vocabulary.
    """
    first, second = keys.unbind(dim=1)
    bits = ids * -1640531527  # odd: golden ratio * 2**32
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


def _suppress(scores: Tensor, suppressed: Tensor) -> None:
    row, token = suppressed.long().unbind(dim=1)
    inside = (row >= 0) & (row < scores.shape[0]) & (token >= 0) & (token < scores.shape[1])
    scores[row[inside], token[inside]] = -torch.inf


def _draw(scores: Tensor, settings: SamplingSettings, rows: Tensor) -> Tensor:
    """int64 [rows]: a fair draw from the logits `scores` of `rows`, which are overwritten."""
    # A tiny temperature may drive the others to -inf, never the best to inf.
    scores -= scores.amax(dim=-1, keepdim=True)
    scores /= settings.temperature[rows, None].clamp(min=MIN_TEMPERATURE)
    if settings.filtered:
        filter_scores(scores, settings.top_k[rows], settings.top_p[rows], settings.min_p[rows])
    keys = settings.keys[rows]
    groups = F.pad(scores, (0, -scores.shape[1] % GROUP), value=-torch.inf).unflatten(1, (-1, GROUP))
    ids = torch.arange(groups.shape[1], dtype=torch.int32, device=scores.device)
    group = (groups.logsumexp(dim=2) + gumbel_noise(keys, ~ids)).argmax(dim=1)
    tokens = group[:, None] * GROUP + torch.arange(GROUP, device=scores.device)
    within = groups[torch.arange(len(rows), device=scores.device), group] + gumbel_noise(keys, tokens.int())
    return tokens.gather(1, within.argmax(dim=1, keepdim=True))[:, 0]


def filter_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set what top-k, top-p and min-p drop of `scores` [rows, vocab] to -inf, in place; maxima must be 0."""
    vocab = scores.shape[1]
    ranked = (((top_k > 0) & (top_k < vocab)) | (top_p < 1)).nonzero().flatten()
    if len(ranked):
        chosen = scores[ranked]
        _filter_by_rank(chosen, top_k[ranked], top_p[ranked, None])
        scores[ranked] = chosen
    scores.masked_fill_(scores < min_p.log()[:, None], -torch.inf)


def _filter_by_rank(scores: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Keep the `top_k` best, and of them the fewest that hold `top_p` of the probability; in place."""
    vocab = scores.shape[1]
    ordered = scores.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
    ordered.masked_fill_(ordered < ordered.gather(1, last[:, None]), -torch.inf)
    probability = ordered.softmax(dim=-1)
    better = probability.cumsum(dim=-1) - probability
    dropped = (better >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    lowest = ordered.masked_fill(dropped | ordered.isneginf(), torch.inf).amin(dim=-1, keepdim=True)
    scores.masked_fill_(scores < lowest, -torch.inf)
