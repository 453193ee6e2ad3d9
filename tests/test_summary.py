import dataclasses
import json
import os

from runner.summary import render_summary, write_summary
from tests.output_rows import job_summary


def test_a_summary_is_kept_as_json_under_the_shards_name(tmp_path):
    write_summary(tmp_path, 3, job_summary())
    write_summary(tmp_path, 3, job_summary(rows=7))
    assert os.listdir(tmp_path / "summary") == ["shard-00003.json"]
    kept = json.loads((tmp_path / "summary" / "shard-00003.json").read_text())
    assert kept == dataclasses.asdict(job_summary(rows=7))


def test_the_text_tells_the_figures_of_the_job():
    lines = render_summary(job_summary()).splitlines()
    assert lines == [
        "rows         1,200, 2 with an error",
        "tokens       40,000 prompt (30,000 from the cache), 8,000 output, 10 computed again",
        "speed        2,500.0 prompt and 500.0 output tokens per second",
        "prefix hits  75.0% of prompt tokens, highest possible 80.0%",
        "pool         93.0% live while rows waited; 500 steps, 3 preemptions, 7 evictions",
        "memory       weights 256 MiB, pool 1,024 MiB",
        "seconds      load 2.0, generate 16.0",
        "device       cpu",
    ]


def test_the_text_says_which_steps_the_pool_share_is_over_and_what_was_not_measured():
    text = render_summary(job_summary(rows_waited=False, seconds={}, peak_bytes=2 << 20))
    assert "over all steps (no row waited)" in text
    assert "peak 2 MiB" in text
    assert "speed" not in text
