"""Greedy and seeded draws: right filters, right distribution, noise that belongs to the row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.batch import SamplingBatch
from engine.sampler import _filter_by_rank, _filter_by_share, gumbel_noise, noise_keys, sample


def settings(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        min_p=np.full(rows, min_p, np.float32),
        seed=np.zeros(rows, np.int64),
        draw_id=np.arange(rows, dtype=np.int64),
        sample=np.zeros(rows, np.int64),
        position=np.full(rows, 5, np.int64),
        suppressed=np.empty((0, 2), np.int64),
    )


def test_greedy_takes_the_best_token_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, -1.0, 0.0]])
    token_ids, failed = sample(logits, settings(2, temperature=0.0))
    assert token_ids.tolist() == [1, 0]
    assert failed.tolist() == [False, False]


def test_draws_follow_the_softmax() -> None:
    rows = 40_000
    probability = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = (probability.log() * 0.7).repeat(rows, 1)
    token_ids, _ = sample(logits, settings(rows, temperature=0.7))
    seen = torch.bincount(token_ids, minlength=5)
    chi_square = float(((seen - rows * probability) ** 2 / (rows * probability)).sum())
    assert chi_square < 23.5  # 4 degrees of freedom: 1 in 10,000


def test_draws_are_fair_in_a_large_vocabulary() -> None:
    rows, vocab = 2_000, 50_000
    token_ids, _ = sample(torch.zeros(rows, vocab), settings(rows))
    seen = torch.bincount(token_ids // (vocab // 20), minlength=20)
    chi_square = float(((seen - rows / 20) ** 2 / (rows / 20)).sum())
    assert chi_square < 50.8  # 19 degrees of freedom: 1 in 10,000
    assert len(set(token_ids.tolist())) > rows * 0.95


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (8, 0.7, 0.1), (1, 0.01, 1.0)]
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(64, 1, dtype=torch.long), logits.clone())
    kept = logits / 0.8
    _filter_by_rank(kept, np.full(64, top_k, np.int32), np.full(64, top_p, np.float32))
    _filter_by_share(kept, np.full(64, min_p, np.float32))
    assert torch.equal(kept.isinf(), expected.isinf())
    assert torch.equal(kept, expected)


def test_settings_belong_to_their_row() -> None:
    # trap 17
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    mixed = dataclasses.replace(
        settings(4), temperature=np.array([0, 1, 0, 1], np.float32), top_k=np.array([0, 1, 0, 0], np.int32)
    )
    token_ids, _ = sample(logits.clone(), mixed)
    best = logits.argmax(-1)
    assert token_ids[:3].tolist() == best[:3].tolist()


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    # trap 13
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(2))
    batch = settings(6)
    together, _ = sample(logits.clone(), batch)
    for row in range(6):
        alone = dataclasses.replace(
            batch,
            **{
                field.name: getattr(batch, field.name)[row : row + 1]
                for field in dataclasses.fields(batch)
                if field.name != "suppressed"
            },
        )
        token_ids, _ = sample(logits[row : row + 1].clone(), alone)
        assert token_ids[0] == together[row]


def test_row_sample_position_and_seed_each_change_the_noise() -> None:
    # trap 13
    batch = settings(5)
    changed = dataclasses.replace(
        batch,
        draw_id=np.array([0, 1, 0, 0, 0]),
        sample=np.array([0, 0, 1, 0, 0]),
        position=np.array([5, 5, 5, 6, 5]),
        seed=np.array([0, 0, 0, 0, 1]),
    )
    noise = gumbel_noise(noise_keys(changed, np.arange(5)), 2000, torch.device("cpu"))
    correlation = np.corrcoef(noise.numpy())
    assert np.abs(correlation - np.eye(5)).max() < 0.1
    assert noise.isfinite().all()


def test_the_noise_is_gumbel() -> None:
    noise = gumbel_noise(noise_keys(settings(20), np.arange(20)), 50_000, torch.device("cpu")).double()
    assert abs(noise.mean() - 0.577216) < 0.005
    assert abs(noise.var() - np.pi**2 / 6) < 0.01


def test_seeds_may_be_negative_and_large() -> None:
    batch = dataclasses.replace(settings(2), seed=np.array([-(2**63), 2**63 - 1]))
    assert len(np.unique(noise_keys(batch, np.arange(2)))) == 4


def test_suppressed_tokens_are_not_drawn() -> None:
    # trap 30
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, 9.0, 1.0]])
    batch = dataclasses.replace(settings(2, temperature=0.0), suppressed=np.array([[1, 1]]))
    assert sample(logits, batch)[0].tolist() == [1, 2]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float, temperature: float) -> None:
    # trap 37
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(3))
    clean, _ = sample(logits.clone(), settings(3, temperature=temperature))
    logits[1, 4] = bad
    token_ids, failed = sample(logits, settings(3, temperature=temperature))
    assert failed.tolist() == [False, True, False]
    assert token_ids[[0, 2]].tolist() == clean[[0, 2]].tolist()
