"""Cut-offs found by search against those of sorting, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import interpreted
from tests.sampling_cases import kept_tokens, make_settings

cutoffs = interpreted("kernels.sampling_cutoff_triton")

# NumPy speaks up where numbers overflow to infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TILE = 256
VOCAB = 1100


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a row has several tiles, and that its candidates may be too many to be gathered."""
    monkeypatch.setattr(cutoffs, "_TILE", TILE)
    monkeypatch.setattr(cutoffs, "_CAPACITY", TILE)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float16, 6.0), (torch.bfloat16, 0.01), (torch.bfloat16, 6.0)]
)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (TILE, 1.0, 0.0),
        (TILE + 1, 0.9, 0.0),  # more than there are lanes
        (VOCAB - 1, 1.0, 0.0),
        (VOCAB + 5, 0.999, 0.0),
        (0, 0.02, 0.0),
        (0, 0.95, 0.2),
        (0, 1.0, 0.3),
        (20, 0.5, 0.01),
    ],
)
def test_cutoffs_keep_what_sorting_keeps(
    top_k: int, top_p: float, min_p: float, dtype: torch.dtype, scale: float
) -> None:
    logits = (torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    settings = make_settings(2, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, near = kept_tokens(logits.double(), settings)
    found = cutoffs.find_cutoffs(logits, settings)
    assert not near.all()
    assert ((logits >= found[:, None]) == kept)[~near].all()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_equal_logits_are_all_kept(filters: dict[str, float]) -> None:
    logits = torch.full((1, VOCAB), -2.5)
    assert cutoffs.find_cutoffs(logits, make_settings(1, **filters))[0] <= -2.5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_end_the_search(bad: float) -> None:
    logits = torch.randn(2, 300)
    logits[:, 100] = bad
    logits[1] = bad
    assert cutoffs.find_cutoffs(logits, make_settings(2, top_k=5, top_p=0.5, min_p=0.1)).shape == (2,)
