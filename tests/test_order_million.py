"""The command that plans and starts a window of short prompts runs to its line; speeds are not looked at."""

from __future__ import annotations

import json

import pytest

from benchmarks import order_million


@pytest.mark.parametrize("order", ["prefix", "input"])
def test_a_window_is_planned_added_and_stepped_through(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    order_million.main(["--rows", "1500", "--blocks", "20000", "--order", order])
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["rows"], figures["order"], figures["pool_blocks"]) == (1500, order, 20_000)
    assert 68 * 1500 <= figures["prompt_tokens"] <= 124 * 1500
    assert figures["waiting"] == 0
    assert 0.5 < figures["highest_hit_rate"] < 1
    assert figures.keys() >= {"seconds_before_first_step_ends", "cpu_us_per_step", "date", "commit", "versions"}


def test_prompts_are_the_same_every_time_and_share_their_prefixes() -> None:
    prompts = order_million.short_prompts(400)
    assert [prompt.tolist() for prompt in prompts] == [prompt.tolist() for prompt in order_million.short_prompts(400)]
    assert len({prompt[:64].tobytes() for prompt in prompts}) == 4
    assert {68 <= len(prompt) <= 124 for prompt in prompts} == {True}
