from runner.step_totals import Occupancy
from runner.summary import render_summary
from tests.output_rows import job_summary


def test_the_text_tells_the_figures_of_the_job():
    lines = render_summary(job_summary()).splitlines()
    assert lines == [
        "rows         1,200, 2 with an error",
        "tokens       40,000 prompt (30,000 from the cache), 8,000 output",
        "speed        2,500.0 prompt and 500.0 output tokens per second",
        "prefix hits  75.0% of prompt tokens (5.0% in the step that fills them); "
        "highest possible within windows 80.0%, 2,000 missed",
        "pool         93.0% live, 6.0% cached, 1.0% free while rows waited; 85.0% live over all steps",
        "blocks       320.0 saved by sharing on average (25.0%), 4.0% of slots unused, 6 duplicate",
        "steps        500, 3 preemptions (10 tokens computed again), 7 evictions",
        "memory       weights 256 MiB, pool 1,024 MiB",
        "seconds      load 2.0, generate 16.0",
        "device       cpu",
    ]


def test_after_a_resumption_speed_is_of_this_attempt_and_each_line_says_what_it_is_of():
    resumed = job_summary(attempt_rows=300, attempt_prompt_tokens=8_000, attempt_output_tokens=1_600)
    lines = dict(line.split(maxsplit=1) for line in render_summary(resumed).splitlines())
    assert lines["rows"] == "1,200, 2 with an error, 900 from earlier attempts (whole job)"
    assert lines["tokens"].endswith("8,000 output (whole job)")
    assert lines["speed"] == "500.0 prompt and 100.0 output tokens per second (this attempt)"
    for name in ("prefix", "pool", "blocks", "steps", "seconds"):
        assert lines[name].endswith("(this attempt)"), name


def test_the_text_says_which_steps_the_pool_share_is_over_and_what_was_not_measured():
    summary = job_summary(
        rows_waited=False,
        occupancy=Occupancy(live=0.4, cached=0.35, free=0.25),
        waiting_occupancy=None,
        seconds={},
        peak_bytes=2 << 20,
    )
    text = render_summary(summary)
    assert "pool         40.0% live, 35.0% cached, 25.0% free over all steps (no row waited)\n" in text
    assert "peak 2 MiB" in text
    assert "speed" not in text


def test_the_text_tells_completions_and_copies_where_rows_have_samples():
    lines = render_summary(job_summary(completions=3600, errors=6, copied_blocks=2400)).splitlines()
    assert lines[0] == "rows         1,200, 3,600 completions, 6 with an error"
    assert "6 duplicate, 2,400 copied" in "\n".join(lines)
