"""What a request may ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.request import Request, Sampling


@pytest.mark.parametrize("values", [{"max_tokens": 0}, {"stop": ("a", "")}])
def test_sampling_that_never_ends_or_ends_everywhere_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be 1 or more, and stop strings .* not empty"):
        Sampling(**values)


@pytest.mark.parametrize(
    ("values", "filtered"),
    [({}, False), ({"temperature": 0.7}, False), ({"top_p": 0.9}, True), ({"top_k": 1}, True), ({"min_p": 0.1}, True)],
)
def test_top_k_top_p_and_min_p_filter_the_vocabulary(values: dict[str, Any], filtered: bool) -> None:
    assert Sampling(**values).filtered == filtered


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_that_no_logits_can_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="must be 0 or more, and finite"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize(("values", "message"), [({"stop_after": 0}, "stop_after 0"), ({"group": -1}, "group -1")])
def test_a_request_that_stops_before_its_first_token_or_has_no_group_number_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Request(0, np.array([1], np.int32), Sampling(), **values)
