"""Whole jobs, from table to table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.plan import highest_hit_tokens, order_rows
from runner.shard_lock import ShardLock
from tests.job_runs import TinyJob, questions
from tests.oracle.greedy import near_ties
from tests.tiny_models import tiny_model, tiny_tokenizer

PREEMPTING_POOL = "engine.kv_memory=2MiB"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    job = TinyJob(tmp_path_factory.mktemp("tiny"))
    job.write(questions(40))
    return job


def total(steps: list[dict[str, Any]], column: str) -> int:
    return sum(step[column] for step in steps)


def test_every_row_comes_back_once_in_input_order_with_its_own_columns(tiny: TinyJob) -> None:
    # trap 43
    output = tiny.run("plain")
    assert output.code == 0
    rows = output.completions
    assert [row["row_id"] for row in rows] == list(range(40))
    assert [row["question"] for row in rows] == questions(40)
    assert {row["sample"] for row in rows} == {0}
    assert {row["error"] for row in rows} == {None}
    assert output.schema.names == [
        "row_id",
        "sample",
        "completion",
        "finish_reason",
        "error",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "question",
    ]


def test_completions_are_transformers_greedy_text(tiny: TinyJob) -> None:
    # trap 32
    rows = tiny.run("ids", "sink.token_ids=true").completions
    reference, tokenizer = tiny_model("llama"), tiny_tokenizer(chat=False)
    for row in rows[:12]:
        prompt = tokenizer(row["question"])["input_ids"]
        assert row["prompt_tokens"] == len(prompt)
        near_ties(reference, prompt, row["token_ids"], vocab=len(tokenizer))
        assert row["completion"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        assert row["output_tokens"] == len(row["token_ids"])


def test_statistics_add_up_and_a_sorted_job_hits_all_that_can_be_hit(tiny: TinyJob) -> None:
    output = tiny.run("stats")
    rows, steps, summary = output.completions, output.steps, output.summary
    prompt_tokens = sum(row["prompt_tokens"] for row in rows)
    prefilled = total(steps, "prefill_tokens") - total(steps, "recomputed_tokens")
    assert total(steps, "cached_tokens") + prefilled == prompt_tokens
    assert sum(row["cached_tokens"] for row in rows) == total(steps, "cached_tokens")
    tokenizer = tiny_tokenizer(chat=False)
    prompts = [np.array(tokenizer(row["question"])["input_ids"], np.int32) for row in rows]
    highest = highest_hit_tokens([prompts[at] for at in order_rows(prompts, "prefix")], 16)
    assert total(steps, "cached_tokens") == highest
    assert summary["hit_rate"] == summary["highest_hit_rate"] == pytest.approx(highest / prompt_tokens)
    for step in steps:
        assert step["blocks_live"] + step["blocks_cached"] + step["blocks_free"] == step["blocks_total"]
        assert step["live_fraction"] == step["blocks_live"] / step["blocks_total"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert summary["rows"] == 40
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in rows)


@pytest.mark.parametrize("sampling", [[], ["sampling.temperature=0.8", "sampling.seed=11", "sampling.top_p=0.95"]])
def test_completions_do_not_depend_on_how_the_job_is_run(tiny: TinyJob, sampling: list[str]) -> None:
    # traps 6, 12, 13
    kind = "seeded" if sampling else "greedy"
    plain = tiny.run(f"{kind}-plain", *sampling)
    preempted = tiny.run(f"{kind}-tight", *sampling, PREEMPTING_POOL, "engine.admission=greedy")
    assert total(preempted.steps, "preemptions") > 0
    variants = {
        "no prefix cache": tiny.run(f"{kind}-cold", *sampling, "engine.prefix_cache=false"),
        "one at a time": tiny.run(f"{kind}-single", *sampling, "engine.max_seqs=1"),
        "preempted": preempted,
        "small chunks": tiny.run(f"{kind}-chunks", *sampling, "engine.max_batch_tokens=70"),
        "input order": tiny.run(f"{kind}-input", *sampling, "order.by=input"),
        "longest first": tiny.run(f"{kind}-longest", *sampling, "order.by=longest"),
        "windows of few rows": tiny.run(f"{kind}-windows", *sampling, "order.window=1KiB"),
        "every length reserved": tiny.run(f"{kind}-reserve", *sampling, PREEMPTING_POOL, "engine.admission=reserve"),
        "blocks of 64": tiny.run(f"{kind}-blocks", *sampling, "engine.block_size=64"),
    }
    assert total(variants["no prefix cache"].steps, "cached_tokens") == 0
    for name, variant in variants.items():
        assert [row["completion"] for row in variant.completions] == [row["completion"] for row in plain.completions], (
            name
        )


def test_shuffled_rows_get_the_same_completions(tiny: TinyJob) -> None:
    plain = tiny.run("shuffle-plain")
    shuffled = questions(40)
    np.random.default_rng(3).shuffle(shuffled)
    path = tiny.write(shuffled, "shuffled.parquet")
    output = tiny.run("shuffle-out", f"source.path={path}")
    assert [row["question"] for row in output.completions] == shuffled
    assert output.texts() == plain.texts()


def test_shuffled_rows_with_ids_draw_the_same_noise(tiny: TinyJob) -> None:
    # trap 13
    seeded = ["sampling.temperature=0.9", "sampling.seed=5", "source.id_column=key", "source.limit=40"]
    table = pa.table({"question": questions(40), "key": [f"row {row}" for row in range(40)]})
    plain = tiny.run("keys", *seeded, f"source.path={tiny.write(table, 'keys.parquet')}").completions
    shuffled = table.take(np.random.default_rng(4).permutation(40))
    output = tiny.run("keys-shuffled", *seeded, f"source.path={tiny.write(shuffled, 'keys-shuffled.parquet')}")
    assert {row["id"]: row["completion"] for row in output.completions} == {
        row["id"]: row["completion"] for row in plain
    }
    assert len({row["completion"] for row in plain}) > 35  # equal questions, each with a draw of its own


def test_the_id_column_may_be_kept_too(tiny: TinyJob) -> None:
    table = pa.table({"question": questions(5), "key": [5, 4, 3, 2, 1]})
    path = tiny.write(table, "kept-keys.parquet")
    output = tiny.run(
        "kept-keys", f"source.path={path}", "source.id_column=key", "sink.keep_columns=[key]", "sampling.temperature=1"
    )
    assert [(row["id"], row["key"]) for row in output.completions] == [(key, key) for key in (5, 4, 3, 2, 1)]


def test_a_finished_job_does_nothing_when_run_again(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    # trap 45
    tiny.run("again")
    before = {path: path.stat().st_mtime_ns for path in (tiny.folder / "again").rglob("*.parquet")}
    assert tiny.run("again").code == 0
    assert {path: path.stat().st_mtime_ns for path in (tiny.folder / "again").rglob("*.parquet")} == before
    assert "is complete: 40 rows" in capsys.readouterr().err


def test_another_sampling_is_refused_on_the_same_output_and_restart_replaces_it(
    tiny: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    # trap 46
    first = tiny.run("changed").texts()
    assert tiny.run("changed", "sampling.temperature=0.9").code == 2
    assert "sampling.temperature was 0.0" in capsys.readouterr().err
    output = tiny.run("changed", "sampling.temperature=0.9", "resume=restart")
    assert output.code == 0
    assert output.texts() != first


def test_an_output_that_another_process_writes_is_left_alone(tiny: TinyJob) -> None:
    # trap 49
    out = tiny.folder / "busy"
    tiny.run("busy", "source.limit=2")
    lock = ShardLock(next(out.glob("_commits/*.lock")))
    try:
        assert tiny.run("busy", "source.limit=2").code == 4
    finally:
        lock.close()


def test_ids_above_2_to_53_with_nulls_and_all_null_columns_keep_their_types(tmp_path: Path) -> None:
    # traps 44, 55
    job = TinyJob(tmp_path)
    ids = [2**53 + 1, None, 2**63 - 1, 5]
    job.write(
        pa.table({"question": ["a", "b", "c", "d"], "key": pa.array(ids, pa.int64()), "note": [None, None, None, "x"]})
    )
    output = job.run(
        "out", "source.id_column=key", "sink.keep_columns=[note]", "sink.rows_per_part=2", "sink.commit_every=1"
    )
    assert [row["id"] for row in output.completions] == ids
    assert [row["note"] for row in output.completions] == [None, None, None, "x"]
    files = sorted((output.folder / "completions").iterdir())
    assert [path.name for path in files] == ["shard-00000-part-00000.parquet", "shard-00000-part-00001.parquet"]
    assert pq.read_schema(files[0]).equals(pq.read_schema(files[1]))


def test_skip_and_limit_keep_the_row_ids_of_the_whole_source(tiny: TinyJob) -> None:
    output = tiny.run("part", "source.skip=5", "source.limit=9")
    assert [row["row_id"] for row in output.completions] == list(range(5, 14))


def test_a_selection_without_rows_is_said(tiny: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("nothing", "source.skip=40").code == 0
    assert "no rows to run: source.path has 40, of which source.skip=40 leaves none" in capsys.readouterr().err


def test_no_rows_make_a_valid_empty_output(tmp_path: Path) -> None:
    # trap 54
    job = TinyJob(tmp_path)
    job.write([])
    output = job.run("out")
    assert output.code == 0
    assert output.completions == []
    assert "question" in output.schema.names
    assert output.summary["rows"] == 0


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_other_kinds_of_input_give_the_same_output(tiny: TinyJob, kind: str) -> None:
    expected = tiny.run("parquet-kind").texts()
    if kind == "jsonl":
        path = tiny.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"question": each}) + "\n" for each in questions(40)))
    else:
        path = tiny.folder / "saved"
        datasets.Dataset.from_dict({"question": questions(40)}).save_to_disk(path)
    assert tiny.run(f"{kind}-kind", f"source.path={path}").texts() == expected


def test_token_ids_run_without_a_tokenizer(tmp_path: Path) -> None:
    job = TinyJob(tmp_path)
    for path in job.model.glob("*token*"):
        path.unlink()
    job.write(pa.table({"question": ["a", "b"], "ids": pa.array([[5, 6, 7], [5, 6, 8, 9]], pa.list_(pa.int64()))}))
    output = job.run("out", "prompt.column=null", "prompt.token_ids_column=ids")
    assert output.code == 0
    assert [row["completion"] for row in output.completions] == [None, None]
    assert all(len(row["token_ids"]) == row["output_tokens"] for row in output.completions)
    near_ties(tiny_model("llama"), [5, 6, 7], output.completions[0]["token_ids"])


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(tiny: TinyJob) -> None:
    # trap 26
    rows = tiny.run("wild", "sampling.temperature=50", "sink.token_ids=true", "sampling.max_tokens=30").completions
    drawn = {token for row in rows for token in row["token_ids"]}
    assert len(drawn) > 150
    assert max(drawn) < len(tiny_tokenizer()) < 320


def test_stop_strings_cut_the_text_and_end_the_row(tiny: TinyJob) -> None:
    # trap 31
    plain = tiny.run("stop-plain", "sampling.ignore_eos=true").completions
    stop = next(found.group() for row in plain if (found := re.search("(?<=.)[A-Za-z]{2}", row["completion"])))
    stopped = tiny.run("stop-out", "sampling.ignore_eos=true", f"sampling.stop=[{stop}]")
    for before, after in zip(plain, stopped.completions, strict=True):
        at = before["completion"].find(stop)
        assert after["completion"] == (before["completion"] if at < 0 else before["completion"][:at])
        assert after["finish_reason"] == ("length" if at < 0 else "stop")


def test_end_tokens_of_the_generation_config_end_a_row(tmp_path: Path) -> None:
    # trap 29
    job = TinyJob(tmp_path)
    job.write(questions(12))
    plain = job.run("plain", "sink.token_ids=true", "sampling.max_tokens=20").completions
    token = plain[0]["token_ids"][5]
    path = job.model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [257, token]}))
    ended = job.run("ended", "sink.token_ids=true", "sampling.max_tokens=20").completions
    assert ended[0]["token_ids"] == plain[0]["token_ids"][: plain[0]["token_ids"].index(token) + 1]
    assert ended[0]["finish_reason"] == "stop"
    ignored = job.run(
        "ignored", "sink.token_ids=true", "sampling.max_tokens=20", "sampling.ignore_eos=true"
    ).completions
    assert ignored[0]["token_ids"] == plain[0]["token_ids"]


def test_messages_use_the_chat_template_once(tmp_path: Path) -> None:
    # trap 28
    job = TinyJob(tmp_path, chat=True)
    messages = [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}],
    ]
    job.write(pa.table({"question": ["a", "b"], "talk": messages}))
    output = job.run(
        "out", "prompt.column=null", "prompt.messages_column=talk", "prompt.system=be brief", "sink.keep_prompt=true"
    )
    assert [row["prompt"] for row in output.completions] == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nown<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sink.keep_columns=[nothing]", "sink.keep_columns: 'nothing'"),
        ("source.id_column=nothing", "source.id_column: 'nothing'"),
        ("prompt.column=nothing", "prompt.column: 'nothing'"),
        ("engine.max_model_len=100000", "engine.max_model_len: 100000; accepted: at most 512"),
        ("engine.kv_memory=1KiB", "engine.kv_memory"),
        ("engine.kv_memory=100TiB", "engine.kv_memory"),
        ("sampling.stop_token_ids=[320]", "sampling.stop_token_ids: [320]; accepted: ids below 320"),
        ("sampling.stop=['</s>']", "sampling.stop_token_ids=[257]"),
        ("model.path=/nowhere", "model.path: '/nowhere'"),
        ("prompt.chat=always", "prompt.chat"),
        ("source.path=/nowhere.parquet", "/nowhere.parquet"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    tiny: TinyJob, override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # traps 27, 34, 42
    assert tiny.run("refused", override).code == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
