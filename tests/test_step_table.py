"""The table of a run's steps."""

from __future__ import annotations

from dataclasses import fields

from benchmarks.step_table import step_table
from engine.stats import StepStats


def step(running: int, prefill_tokens: int, duration_us: int) -> StepStats:
    zeros = {field.name: 0 for field in fields(StepStats)}
    return StepStats(**zeros | {"running": running, "prefill_tokens": prefill_tokens, "duration_us": duration_us})


def test_every_step_is_in_one_line_with_its_time() -> None:
    steps = [step(3, 100, 9000), step(16, 0, 1000), step(3, 0, 2000), step(17, 0, 5000), step(40, 0, 8000)]
    lines = step_table(steps, [500, 10, 30, 50, 70]).splitlines()
    assert [line[:20].strip() for line in lines[1:]] == [
        "prompt chunks, too",
        "1 to 16 decodes",
        "17 to 32 decodes",
        "33 to 64 decodes",
    ]
    assert [line[20:].split() for line in lines[1:]] == [
        ["1", "0.01", "9.00", "500"],
        ["2", "0.00", "1.50", "20"],
        ["1", "0.01", "5.00", "50"],
        ["1", "0.01", "8.00", "70"],
    ]


def test_a_run_without_steps_has_a_heading_alone() -> None:
    assert len(step_table([], []).splitlines()) == 1
