"""Both forms of sampling against the float64 reference. Without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import SamplingSettings, sample_tokens
from kernels.sampling_torch import filter_scores, gumbel_noise, sample_tokens_torch
from tests.interpreted import interpreted
from tests.sampling_cases import (
    excess_chi_square,
    kept_tokens,
    make_settings,
    mixed_settings,
    reference_draws,
    select_rows,
    softmax_of_kept,
)

# Rows that are not finite end in sums and differences that are not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TILE = 256
"""So small that a row has many tiles, and that its candidates may be too many to be gathered."""
FILTERS = {
    "none": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
}

Sample = Callable[..., None]


@pytest.fixture
def triton_form(monkeypatch: pytest.MonkeyPatch) -> Sample:
    kernels = interpreted("kernels.sampling_triton")
    cutoffs = interpreted("kernels.sampling_cutoff_triton")
    monkeypatch.setattr(kernels, "_TILE", TILE)
    monkeypatch.setattr(cutoffs, "_TILE", TILE)
    monkeypatch.setattr(cutoffs, "_CAPACITY", TILE)
    return kernels.sample_tokens_triton


@pytest.fixture(params=["torch", "triton"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return sample_tokens_torch if request.param == "torch" else request.getfixturevalue("triton_form")


def draw(sample: Sample, logits: Tensor, settings: SamplingSettings) -> list[int]:
    out = torch.full((logits.shape[0],), 12_345, dtype=torch.int32)
    sample(logits.clone(), settings, out=out)
    return out.tolist()


def random_logits(rows: int, vocab: int, *, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale).to(dtype)


def test_greedy_takes_the_best_token_and_the_first_of_equals(sample: Sample) -> None:
    logits = random_logits(3, 1000)
    logits[0, [7, 300, 900]] = 50.0
    logits[1, [999, 600]] = 50.0
    assert draw(sample, logits, make_settings(3, temperature=0.0)) == [7, 600, int(logits[2].argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, TILE, 1001])
def test_draws_are_those_of_the_reference(sample: Sample, vocab: int, dtype: torch.dtype) -> None:
    logits, settings = random_logits(12, vocab, dtype=dtype), mixed_settings(12, vocab)
    expected, unsure = reference_draws(logits, settings)
    drawn = torch.tensor(draw(sample, logits, settings))
    assert (unsure | (drawn == expected)).all()
    assert unsure.sum() < 3


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_softmax_of_the_tokens_kept(filters: dict[str, float]) -> None:
    rows = 100_000
    logits, settings = random_logits(1, 30, scale=1.5), make_settings(rows, temperature=1.3, **filters)
    drawn = torch.tensor(draw(sample_tokens_torch, logits.expand(rows, -1), settings))
    assert excess_chi_square(drawn, softmax_of_kept(logits, settings)) < 5


def test_draws_are_fair_in_a_large_vocabulary() -> None:
    rows, vocab = 1_000, 20_000
    drawn = torch.tensor(draw(sample_tokens_torch, torch.zeros(rows, vocab), make_settings(rows)))
    assert excess_chi_square(drawn // (vocab // 20), torch.full((20,), 0.05, dtype=torch.float64)) < 5
    assert len(drawn.unique()) > rows * 0.95


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (8, 0.7, 0.1), (1, 0.01, 1.0)]
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(64, 100)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(64, 1, dtype=torch.long), logits.clone()).isinf()
    settings = make_settings(64, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = (logits - logits.amax(dim=1, keepdim=True)) / 0.8
    filter_scores(scores, settings.top_k, settings.top_p, settings.min_p)
    assert torch.equal(scores.isinf(), expected)
    assert torch.equal(~kept_tokens(logits.double(), settings)[0], expected)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.4}])
def test_all_tokens_that_tie_with_the_last_one_kept_may_be_drawn(sample: Sample, filters: dict[str, float]) -> None:
    logits = torch.full((24, 520), -9.0)
    logits[:, [5, 255, 256, 519]] = torch.tensor([2.0, 1.5, 1.5, 1.5])
    assert {*draw(sample, logits, make_settings(24, **filters))} == {5, 255, 256, 519}


# traps 13 and 17
def test_a_draw_depends_on_its_own_row_alone(sample: Sample) -> None:
    logits, settings = random_logits(6, 700), mixed_settings(6, 700)
    settings = replace(settings, suppressed=settings.suppressed[:0])
    together = draw(sample, logits, settings)
    for row in range(6):
        place = slice(row, row + 1)
        assert draw(sample, logits[place], select_rows(settings, place)) == together[place]
    turned = SamplingSettings(
        settings.temperature.flip(0),
        settings.top_p.flip(0),
        settings.top_k.flip(0),
        settings.min_p.flip(0),
        settings.keys.flip(0),
        settings.suppressed,
        filtered=True,
    )
    assert draw(sample, logits.flip(0), turned) == together[::-1]


# trap 37
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
def test_logits_that_are_not_finite_fail_their_row_alone(
    sample: Sample, bad: float, temperature: float, top_p: float
) -> None:
    logits = random_logits(4, 600)
    settings = make_settings(4, temperature=temperature, top_p=top_p, suppressed=[(2, 599)])
    clean = draw(sample, logits, settings)
    logits[1, 300] = bad
    logits[2, 599] = bad
    assert draw(sample, logits, settings) == [clean[0], -1, -1, clean[3]]


# trap 30
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 1}, {"top_p": 0.9}, {"temperature": 1e6}])
def test_suppressed_tokens_are_not_drawn(sample: Sample, filters: dict[str, float], dtype: torch.dtype) -> None:
    logits = random_logits(4, 300, dtype=dtype)
    logits[:, 299] = 20.0
    suppressed = [(row, 299) for row in range(4)] + [(0, token) for token in range(2, 300)]
    drawn = draw(sample, logits, make_settings(4, suppressed=suppressed, **filters))
    assert 299 not in drawn
    assert drawn[0] in (0, 1)


def test_suppressed_pairs_out_of_range_are_padding(sample: Sample) -> None:
    logits = random_logits(2, 40)
    clean = draw(sample, logits, make_settings(2))
    outside = [(-1, 3), (2, 3), (0, -1), (1, 40), (-1, -1)]
    assert draw(sample, logits, make_settings(2, suppressed=outside)) == clean


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_with_every_token_suppressed_still_gets_a_token(sample: Sample, filters: dict[str, float]) -> None:
    settings = make_settings(1, suppressed=[(0, token) for token in range(5)], **filters)
    assert draw(sample, torch.zeros(1, 5), settings)[0] in range(5)


# trap 26
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_ids_of_a_padded_head_are_neither_read_nor_drawn(sample: Sample, filters: dict[str, float]) -> None:
    head = random_logits(3, 640)
    settings = make_settings(3, **filters)
    clean = draw(sample, head[:, :601], settings)
    for padding in (torch.nan, 100.0):
        head[:, 601:] = padding
        out = torch.empty(3, dtype=torch.int32)
        sample(head.clone()[:, :601], settings, out=out)
        assert out.tolist() == clean


@pytest.mark.parametrize("temperature", [1e-45, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_a_tiny_temperature_draws_fairly_among_the_best(
    sample: Sample, temperature: float, filters: dict[str, float]
) -> None:
    logits = random_logits(16, 300)
    logits[:, [3, 299]] = 3e38
    drawn = draw(sample, logits, make_settings(16, temperature=temperature, **filters))
    assert {*drawn} == {3, 299}
    assert 3 < drawn.count(3) < 13


def test_filters_are_ignored_where_no_row_is_said_to_have_any(sample: Sample) -> None:
    logits, settings = random_logits(8, 300), make_settings(8, top_k=1)
    assert draw(sample, logits, replace(settings, filtered=False)) == draw(sample, logits, make_settings(8))


def test_draws_go_to_their_places_and_nowhere_else(sample: Sample) -> None:
    logits, settings = random_logits(4, 300), make_settings(4)
    logits[2, 7] = torch.nan
    first, second, _, fourth = draw(sample, logits, settings)
    out = torch.full((7,), 12_345, dtype=torch.int32)
    sample(logits.clone(), settings, out=out, places=torch.tensor([5, 0, 3, 2]))
    assert out.tolist() == [second, 12_345, fourth, -1, 12_345, first, 12_345]


@pytest.mark.parametrize("token", [0, 7, 8, 15, 16, 296, 300])
def test_each_token_of_a_group_may_be_drawn(sample: Sample, token: int) -> None:
    logits = random_logits(8, 301)
    logits[:, token] = 80.0
    assert draw(sample, logits, make_settings(8)) == [token] * 8


def test_no_rows_draw_nothing(sample: Sample) -> None:
    assert draw(sample, torch.empty(0, 10), make_settings(0)) == []


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be contiguous"):
        sample_tokens(torch.zeros(10, 4).T, make_settings(4), out=torch.empty(4, dtype=torch.int32))


def test_noise_never_changes_from_release_to_release() -> None:
    # An unfinished job that is resumed must draw as it did.
    keys = torch.tensor([[-1429732760, 556823690], [-134624849, -1984961679]], dtype=torch.int32)
    expected = torch.tensor(
        [
            [0.7960990071, 0.2687222362, -0.1100099161, 0.6497809887, -0.0472067893],
            [3.9427757263, 0.3536387086, 0.3314069211, -1.3873311281, 0.5463191867],
        ]
    )
    torch.testing.assert_close(gumbel_noise(keys, torch.arange(5, dtype=torch.int32)), expected, rtol=1e-5, atol=1e-6)


def test_noise_is_gumbel_and_independent_from_row_to_row() -> None:
    keys = make_settings(20).keys
    keys[1] = keys[0] ^ torch.tensor([1, 0])
    keys[2] = keys[0] ^ torch.tensor([0, 1])
    noise = gumbel_noise(keys, torch.arange(-50_000, 50_000, dtype=torch.int32)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.577216) < 0.005
    assert abs(noise.var() - torch.pi**2 / 6) < 0.01
    assert (torch.corrcoef(noise) - torch.eye(20)).abs().max() < 0.03
