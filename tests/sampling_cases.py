"""Settings, the float64 reference and the statistics shared by the CPU and the GPU tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sampling import SamplingSettings
from kernels.sampling_torch import GROUP, gumbel_noise


def make_settings(
    rows: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    suppressed: Sequence[tuple[int, int]] = (),
    device: str = "cpu",
) -> SamplingSettings:
    """The same settings for every row, with keys of its own."""
    generator = torch.Generator().manual_seed(rows)
    return SamplingSettings(
        temperature=torch.full((rows,), temperature, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=device),
        min_p=torch.full((rows,), min_p, device=device),
        keys=torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(device, torch.int32),
        suppressed=torch.tensor(suppressed, dtype=torch.int32, device=device).reshape(-1, 2),
        filtered=top_p < 1 or top_k > 0 or min_p > 0,
    )


def mixed_settings(rows: int, vocab: int, *, device: str = "cpu") -> SamplingSettings:
    """Every row has settings of its own: some are greedy, and each filter is off in about half of them."""
    generator = torch.Generator().manual_seed(rows + vocab)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(rows, generator=generator) * (high - low) + low

    def off(tensor: Tensor, value: float, share: float) -> Tensor:
        return tensor.masked_fill(uniform(0, 1) < share, value)

    pairs = torch.stack((uniform(0, rows), uniform(0, vocab)), dim=1)
    return SamplingSettings(
        temperature=off(uniform(0.2, 1.6), 0, 0.15).to(device),
        top_p=off(uniform(0.05, 0.999), 1, 0.4).to(device),
        top_k=off(torch.minimum(1 / uniform(0.001, 1), uniform(1, vocab)), 0, 0.4).to(device, torch.int32),
        min_p=off(uniform(0, 0.2), 0, 0.5).to(device),
        keys=torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(device, torch.int32),
        suppressed=pairs.to(device, torch.int32),
        filtered=True,
    )


def select_rows(settings: SamplingSettings, rows: slice) -> SamplingSettings:
    """The settings of some rows, without suppressed tokens."""
    return SamplingSettings(
        temperature=settings.temperature[rows],
        top_p=settings.top_p[rows],
        top_k=settings.top_k[rows],
        min_p=settings.min_p[rows],
        keys=settings.keys[rows],
        suppressed=settings.suppressed[:0],
        filtered=settings.filtered,
    )


def suppress(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Logits in float64 with suppressed tokens at -inf."""
    row, token = settings.suppressed.long().unbind(dim=1)
    logits = logits.double()
    logits[row, token] = -torch.inf
    return logits


def kept_tokens(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """What the filters keep of float64 logits, bool [rows, vocab], by sorting; greedy rows keep all.

    The second tensor, bool [rows], tells the rows with a token so near a filter's boundary that float32 may
    decide otherwise.
    """
    vocab = logits.shape[1]
    best, order = logits.sort(dim=1, descending=True)
    weight = ((best - best[:, :1]) / settings.temperature.double().clamp(min=1e-30)[:, None]).exp()
    top_p, min_p = settings.top_p.double()[:, None], settings.min_p.double()[:, None]
    last = torch.where(settings.top_k > 0, settings.top_k, vocab).clamp(max=vocab).long() - 1
    ranked = best >= best.gather(1, last[:, None])
    mass = (weight * ranked).cumsum(dim=1)
    total = mass[:, -1:]
    kept = ranked & ((mass - weight < top_p * total) | (top_p >= 1))
    kept[:, 0] = True
    # All that tie with a kept token are kept.
    lowest = best.masked_fill(~kept, torch.inf).amin(dim=1, keepdim=True)
    kept = (best >= lowest) & (weight >= min_p)
    near = ranked & ((mass / total - top_p).abs() < 1e-6) & (top_p < 1)
    near |= (weight - min_p).abs() < 1e-6 * min_p
    greedy = settings.temperature == 0
    return torch.zeros_like(kept).scatter(1, order, kept) | greedy[:, None], near.any(dim=1) & ~greedy


def reference_draws(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """int64 [rows]: the draws in float64 from finite logits; bool [rows]: those that rounding may change."""
    logits = suppress(logits, settings)
    kept, near = kept_tokens(logits, settings)
    temperature = settings.temperature.double()[:, None]
    scores = ((logits - logits.amax(dim=1, keepdim=True)) / temperature.clamp(min=1e-30)).masked_fill(~kept, -torch.inf)
    groups = F.pad(scores, (0, -scores.shape[1] % GROUP), value=-torch.inf).unflatten(1, (-1, GROUP))
    group_ids = torch.arange(groups.shape[1], dtype=torch.int32, device=logits.device)
    group, near_group = _best(groups.logsumexp(dim=2) + gumbel_noise(settings.keys, ~group_ids).double())
    ids = group[:, None] * GROUP + torch.arange(GROUP, device=logits.device)
    within = groups.gather(1, group[:, None, None].expand(-1, 1, GROUP))[:, 0]
    place, near_token = _best(within + gumbel_noise(settings.keys, ids.int()).double())
    drawn = torch.where(settings.temperature > 0, group * GROUP + place, scores.argmax(dim=1))
    return drawn, near | ((near_group | near_token) & (settings.temperature > 0))


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The place of the greatest score of each row, and whether rounding may change it."""
    first, second = F.pad(scores, (0, 1), value=-torch.inf).topk(2, dim=1).values.unbind(dim=1)
    return scores.argmax(dim=1), first - second < 2e-5


def softmax_of_kept(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """float64 [vocab]: the probabilities from which rows of `logits` [1, vocab] and these settings are drawn."""
    one = select_rows(settings, slice(0, 1))
    kept, _ = kept_tokens(logits.double(), one)
    return (logits.double() / one.temperature[:, None]).masked_fill(~kept, -torch.inf).softmax(dim=1)[0]


def excess_chi_square(tokens: Tensor, probability: Tensor) -> float:
    """Chi-square of the draws less its mean, in standard deviations; infinite if an impossible one was drawn."""
    seen = torch.bincount(tokens.long(), minlength=len(probability)).double()
    possible = probability > 0
    if seen[~possible].any():
        return torch.inf
    expected = len(tokens) * probability[possible]
    freedom = len(expected) - 1
    return float((((seen[possible] - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)
