"""The compiled sampling kernels at real sizes."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kernels.sampling import SamplingSettings, sample_tokens
from tests.sampling_cases import (
    excess_chi_square,
    make_settings,
    mixed_settings,
    reference_draws,
    select_rows,
    softmax_of_kept,
)

FILTERS = {
    "none": {},
    "top_k": {"top_k": 10},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def random_logits(rows: int, vocab: int, *, scale: float = 3.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows + vocab)
    return (torch.randn(rows, vocab, generator=generator, device="cuda") * scale).to(dtype)


def draw(logits: Tensor, settings: SamplingSettings) -> Tensor:
    out = torch.full((len(logits),), 12_345_678, dtype=torch.int32, device="cuda")
    sample_tokens(logits.clone(), settings, out=out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("vocab", [1, 1000, 50_257, 128_256, 151_936])
def test_draws_are_those_of_the_reference(vocab: int, scale: float, dtype: torch.dtype) -> None:
    logits, settings = random_logits(96, vocab, scale=scale, dtype=dtype), mixed_settings(96, vocab, device="cuda")
    if vocab == 1:
        assert not draw(logits, settings).any()
        return
    expected, unsure = reference_draws(logits, settings)
    assert (unsure | (draw(logits, settings) == expected)).all()
    assert unsure.sum() < 30


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_softmax_of_the_tokens_kept(filters: dict[str, float]) -> None:
    logits, settings = random_logits(1, 40, scale=1.5), make_settings(1_000_000, device="cuda", **filters)
    drawn = draw(logits.expand(1_000_000, -1), settings)
    assert excess_chi_square(drawn, softmax_of_kept(logits, settings)) < 5


# traps 13 and 17
def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    logits, settings = random_logits(300, 151_936), mixed_settings(300, 151_936, device="cuda")
    settings = select_rows(settings, slice(0, 300))
    together = draw(logits, settings)
    assert torch.equal(draw(logits, settings), together)
    for part in (slice(0, 1), slice(7, 40), slice(100, 300)):
        assert torch.equal(draw(logits[part], select_rows(settings, part)), together[part])


# trap 26
@pytest.mark.parametrize("padding", [torch.nan, 100.0])
def test_ids_of_a_padded_head_are_neither_read_nor_drawn(padding: float) -> None:
    head, settings = random_logits(64, 151_936), mixed_settings(64, 151_669, device="cuda")
    clean = draw(head[:, :151_669], settings)
    head[:, 151_669:] = padding
    out = torch.full_like(clean, 12_345_678)
    sample_tokens(head[:, :151_669], settings, out=out)
    assert torch.equal(out, clean)


# trap 37
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float) -> None:
    logits, settings = random_logits(64, 151_936), mixed_settings(64, 151_936, device="cuda")
    settings.suppressed[3] = torch.tensor([9, 151_935])
    expected = draw(logits, settings)
    for row, token in ((3, 0), (9, 151_935), (40, 70_000)):
        logits[row, token] = bad
        expected[row] = -1
    assert torch.equal(draw(logits, settings), expected)


# trap 22
def test_a_captured_graph_draws_with_the_settings_of_its_replay() -> None:
    static, held = mixed_settings(32, 50_000, device="cuda"), random_logits(32, 50_000)
    out = torch.empty(32, dtype=torch.int32, device="cuda")
    sample_tokens(held.clone(), static, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(held, static, out=out)
    for seed in (1, 2):
        logits, settings = random_logits(32, 50_000, scale=seed), mixed_settings(32, 50_000 + seed, device="cuda")
        held.copy_(logits)
        for field in fields(static):
            if field.name != "filtered":
                getattr(static, field.name).copy_(getattr(settings, field.name))
        graph.replay()
        assert torch.equal(out, draw(logits, settings))


# trap 19
def test_rows_beyond_2_to_the_31_elements_are_reached() -> None:
    rows, vocab = 14_300, 151_936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    settings = make_settings(rows, top_k=1, suppressed=[(rows - 1, 5)], device="cuda")
    logits[:, 5] = 1.0
    logits[-1, 7] = 0.5
    out = torch.empty(rows, dtype=torch.int32, device="cuda")
    sample_tokens(logits, settings, out=out)
    assert (out[:-1] == 5).all()
    assert out[-1] == 7
