import contextlib
import io
import os
import pty
import re
import termios

import pytest

from runner.progress import Progress, Workload
from runner.step_totals import StatsTotals
from tests.output_rows import step_stats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def work(**changes: int | None) -> Workload:
    values: dict[str, int | None] = {
        "rows_total": 10,
        "rows_read": 10,
        "prompt_tokens": 1000,
        "rows_done": 2,
        "output_tokens": 40,
        "max_tokens": 100,
    }
    return Workload(**{**values, **changes})


def totals_of(**sums: int) -> StatsTotals:
    return StatsTotals(**sums)


def test_a_log_gets_whole_lines_and_only_every_interval():  # trap 56
    clock, stream, totals = Clock(), io.StringIO(), StatsTotals()
    with Progress(10, stream=stream, clock=clock, interval_s=10) as progress:
        for step in range(100):
            clock.now += 0.25
            totals.add(step_stats(step))
            progress.update(totals, work())
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["0:00:10", "0:00:20"]
    # A step is 10 prompt tokens and 2 decoded ones in a quarter of a second, half of the pool live.
    assert "rows 2/10 (20%) | in 40 tok/s | out 8 tok/s | prefix hits 20.0% | pool 50% live | ETA" in lines[1]


def test_a_log_that_cannot_be_written_costs_no_job():
    clock, totals = Clock(), StatsTotals()
    with open("/dev/full", "w") as stream:
        with Progress(10, stream=stream, clock=clock) as progress:
            progress.show(totals, work())
            progress.show(totals, work())
        with pytest.raises(OSError, match="No space"):
            stream.close()


def test_a_terminal_that_is_gone_costs_no_job():
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    clock, totals = Clock(), StatsTotals()
    with Progress(10, stream=stream, clock=clock) as progress:
        os.close(ours)
        progress.show(totals, work())
        progress.show(totals, work())
        assert stream.isatty() is False
    with contextlib.suppress(OSError):
        stream.close()


def test_rates_are_of_the_time_since_the_last_line():
    clock, stream, totals = Clock(), io.StringIO(), StatsTotals()
    with Progress(10, stream=stream, clock=clock) as progress:
        clock.now += 10
        totals.prefill_tokens = 5000
        progress.update(totals, work())
        clock.now += 10
        totals.decode_tokens = 30
        progress.update(totals, work())
    first, second = stream.getvalue().splitlines()
    assert "in 500 tok/s | out 0 tok/s" in first
    assert "in 0 tok/s | out 3 tok/s" in second


def test_the_time_left_counts_all_samples_of_a_row():
    # 4 of 10 rows of 3 samples are done, each of 10 tokens, the first of which comes from the prefill.
    rest = work(rows_done=4, samples=3, max_tokens=100, output_tokens=120)
    totals = totals_of(prefill_tokens=1000, decode_tokens=108)
    assert rest.tokens_left(totals) == pytest.approx(6 * 30)


def test_the_time_left_counts_tokens_not_rows():  # trap 56
    # 9 of 10 short rows are done, and the last, long one is most of the work.
    rest = work(rows_done=9, prompt_tokens=900, output_tokens=90)
    totals = totals_of(prefill_tokens=100, decode_tokens=81)
    assert rest.tokens_left(totals) == pytest.approx(800 + 10)
    clock, stream = Clock(), io.StringIO()
    with Progress(10, stream=stream, clock=clock) as progress:
        clock.now += 181
        progress.update(totals, rest)
    assert stream.getvalue().endswith("ETA 0:13:30\n"), "810 tokens at one a second"


def test_rows_not_read_yet_count_with_the_mean_prompt():
    left = work(rows_read=5, prompt_tokens=500, rows_done=5, output_tokens=100).tokens_left(
        totals_of(prefill_tokens=500, decode_tokens=95)
    )
    assert left == 500 + 100


def test_prompt_tokens_count_as_far_as_they_are_not_found_in_the_cache():
    left = work(rows_read=5, prompt_tokens=500, rows_done=5, output_tokens=100).tokens_left(
        totals_of(prefill_tokens=125, cached_tokens=375, decode_tokens=95)
    )
    assert left == 500 / 4 + 100


def test_no_time_is_told_until_finished_rows_hold_half_of_what_is_written():
    # The short rows come first: three of 100 are done after 4 tokens each, the 64 that run have written as many.
    early = work(rows_total=100, rows_done=3, output_tokens=12)
    totals = totals_of(cached_tokens=900, prefill_tokens=100, decode_tokens=9 + 61 * 4)
    assert early.tokens_left(totals) is None
    assert work(rows_done=0, output_tokens=0).tokens_left(totals) is None
    stream = io.StringIO()
    with Progress(100, stream=stream, clock=Clock()) as progress:
        progress.show(totals, early)
    assert stream.getvalue().endswith("ETA unknown\n")


def test_what_running_rows_have_written_counts_towards_the_mean_output():
    left = work(rows_done=5, output_tokens=100).tokens_left(totals_of(prefill_tokens=1000, decode_tokens=95 + 50))
    assert left == 5 * 150 / 5


def test_no_row_is_expected_to_write_more_than_it_may():
    full = work(rows_done=8, output_tokens=800)
    assert full.tokens_left(totals_of(prefill_tokens=1000, decode_tokens=792 + 150)) == 2 * 100 - 150


def test_rows_of_earlier_attempts_are_counted():
    stream = io.StringIO()
    with Progress(40, stream=stream, clock=Clock()) as progress:
        progress.show(totals_of(), work(rows_before=30))
        progress.show(totals_of(), work(rows_before=30, rows_total=None))
    first, second = stream.getvalue().splitlines()
    assert "rows 32/40 (80%)" in first
    assert "rows 32 |" in second


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (work(rows_total=None), r"rows 2 \| .*ETA unknown$"),
        (work(rows_done=10), r"rows 10/10 \(100%\) .*ETA 0:00:00$"),
        (work(rows_total=0, rows_read=0, rows_done=0, prompt_tokens=0), r"rows 0/0 \(100%\) .*ETA 0:00:00$"),
    ],
)
def test_the_last_line_of_a_job_whose_length_is_known_or_not(state, shown):
    stream = io.StringIO()
    with Progress(state.rows_total, stream=stream, clock=Clock()) as progress:
        progress.show(totals_of(), state)
    assert re.search(shown, stream.getvalue().rstrip("\n"))


@pytest.mark.parametrize("rows_total", [10, None])
def test_a_terminal_gets_one_bar_drawn_again(rows_total):
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 200))
    clock = Clock()
    with open(writer, "w") as terminal:
        with Progress(rows_total, stream=terminal, clock=clock) as progress:
            for _ in range(3):
                clock.now += 1
                progress.update(totals_of(prefill_tokens=50), work(rows_total=rows_total))
        drawn = ""
        while not drawn.endswith("\n"):
            drawn += os.read(reader, 100_000).decode(errors="replace")
    os.close(reader)
    assert drawn.count("\n") == 1
    assert "\r" in drawn
    assert "rows 2" in drawn
    assert "ETA" in drawn
