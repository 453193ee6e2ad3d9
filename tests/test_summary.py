from runner.summary import render_summary
from tests.output_rows import job_summary


def test_the_text_tells_the_figures_of_the_job():
    lines = render_summary(job_summary()).splitlines()
    assert lines == [
        "rows         1,200, 2 with an error",
        "tokens       40,000 prompt (30,000 from the cache), 8,000 output",
        "speed        2,500.0 prompt and 500.0 output tokens per second",
        "prefix hits  75.0% of prompt tokens, highest possible within windows 80.0%",
        "pool         93.0% live while rows waited; 500 steps, 3 preemptions (10 tokens computed again), 7 evictions",
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
    assert lines["prefix"].endswith("(this attempt)")
    assert lines["pool"].endswith("(this attempt)")
    assert lines["seconds"].endswith("(this attempt)")


def test_the_text_says_which_steps_the_pool_share_is_over_and_what_was_not_measured():
    text = render_summary(job_summary(rows_waited=False, seconds={}, peak_bytes=2 << 20))
    assert "over all steps (no row waited)" in text
    assert "peak 2 MiB" in text
    assert "speed" not in text
