import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import show

PREFIX = {
    "hit_rate": 0.75,
    "highest_hit_rate": 0.8,
    "rows": 4,
    "attempt_rows": 4,
    "prompt_tokens": 1000,
    "attempt_prompt_tokens": 1000,
}


def write_output(out: Path, rows: int, samples: int = 1) -> None:
    completions = {
        "row_id": range(rows),
        "id": range(100, 100 + rows),
        "sample": pa.array([row % samples for row in range(rows)], pa.int32()),
        "completion": [None if row == 1 else f" text {row}\nTopic: x" for row in range(rows)],
        "error": ["too long" if row == 1 else None for row in range(rows)],
        "output_tokens": [3] * rows,
        "message": [f"message {row}" for row in range(rows)],
    }
    stats = {"blocks_total": [8, 8], "blocks_live": [4, 8], "running": [1, 2], "preemptions": [0, 3]}
    for name, columns in (("completions", completions), ("stats", stats)):
        (out / name).mkdir(parents=True)
        pq.write_table(pa.table({key: [*values] for key, values in columns.items()}), out / name / "part.parquet")
    (out / "summary").mkdir()
    (out / "summary" / "shard-00000.json").write_text(json.dumps(PREFIX))


def test_completions_hit_rate_and_pool_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_output(tmp_path, 4)
    assert show.main([str(tmp_path), "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "row 0, id 100\n  message     message 0\n  completion  text 0\n              Topic: x\n" in shown
    assert "row 2" in shown
    assert "row 1" not in shown
    assert "75.00% of 1,000 prompt tokens; highest possible within windows 80.00%" in shown
    assert "8 blocks; held by running rows 75.0% on average, 100.0% at most; 2 steps, 2 rows at once" in shown
    assert "3 preemptions" in shown


def test_the_hit_rate_of_a_resumed_job_is_said_to_be_of_its_last_attempt() -> None:
    text = show.prefix_text([{**PREFIX, "attempt_rows": 1, "attempt_prompt_tokens": 250}])
    assert "75.00% of 250 prompt tokens (last attempt); highest" in text


def test_an_error_row_is_shown_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_output(tmp_path, 2)
    assert show.main([str(tmp_path)]) == 0
    assert "completion  error: too long" in capsys.readouterr().out


def test_an_empty_output_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_output(tmp_path, 0)
    assert show.main([str(tmp_path)]) == 0
    assert "prefix hits" in capsys.readouterr().out


def test_a_folder_without_a_finished_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([str(tmp_path)]) == 2
    assert "no finished job" in capsys.readouterr().err


def test_samples_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_output(tmp_path, 4, samples=2)
    assert show.main([str(tmp_path), "--rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "row 0, id 100, sample 0\n" in shown
    assert "row 3, id 103, sample 1\n" in shown
