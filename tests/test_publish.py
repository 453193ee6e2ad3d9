import dataclasses
import json
import os
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runner.config import SinkConfig
from runner.output_schema import STATS_SCHEMA
from runner.publish import publish
from runner.records import LedgerError
from runner.sink import Sink
from tests.output_rows import (
    SCHEMA,
    commit_rows,
    job_summary,
    open_ledger,
    output_row,
    publish_rows,
    read_folder,
    row_ids_of,
)


def shuffled(count: int) -> list[int]:
    rows = list(range(count))
    random.Random(0).shuffle(rows)
    return rows


def commit_in_parts(ledger, row_ids: list[int], part: int) -> None:
    for start in range(0, len(row_ids), part):
        commit_rows(ledger, row_ids[start : start + part])


def test_rows_are_published_in_input_order_and_parts_are_gone(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_in_parts(ledger, shuffled(50), 7)
        publish_rows(ledger, 50, rows_per_part=20)
        assert ledger.is_complete
    folder = tmp_path / "completions"
    names = [f"shard-00000-part-0000{number}.parquet" for number in range(3)]
    assert sorted(os.listdir(folder)) == names
    assert [pq.read_metadata(folder / name).num_rows for name in names] == [20, 20, 10]
    table = read_folder(folder)
    assert table.column("row_id").to_pylist() == list(range(50))
    assert table.column("completion").to_pylist() == [f"answer {row}" for row in range(50)]
    assert table.schema == SCHEMA
    assert os.listdir(tmp_path / "_parts") == []
    assert sorted(os.listdir(tmp_path / "_commits")) == ["shard-00000.json", "shard-00000.lock"]


def test_a_folder_of_more_than_ten_files_reads_in_order(tmp_path):  # trap 48
    with open_ledger(tmp_path) as ledger:
        commit_in_parts(ledger, shuffled(36), 10)
        publish_rows(ledger, 36, rows_per_part=3)
    names = sorted(os.listdir(tmp_path / "completions"))
    assert len(names) == 12
    assert [row for name in names for row in row_ids_of(tmp_path / "completions" / name)] == list(range(36))
    assert row_ids_of(tmp_path / "completions") == list(range(36))


def test_more_parts_than_are_read_side_by_side_are_merged_in_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.publish.MERGE_WIDTH", 3)
    monkeypatch.setattr("runner.publish.ROW_GROUP_ROWS", 4)
    monkeypatch.setattr("runner.merge.ROW_GROUP_ROWS", 4)
    monkeypatch.setattr("runner.merge._MIN_BATCH_ROWS", 1)
    with open_ledger(tmp_path) as ledger:
        commit_in_parts(ledger, shuffled(60), 5)
        publish_rows(ledger, 60, rows_per_part=25)
    assert row_ids_of(tmp_path / "completions") == list(range(60))
    assert os.listdir(tmp_path / "_parts") == []


def test_samples_of_a_row_are_published_together_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.publish.ROW_GROUP_ROWS", 4)
    pairs = [(row, sample) for row in range(9) for sample in range(3)]
    random.Random(1).shuffle(pairs)
    with open_ledger(tmp_path) as ledger:
        with Sink(ledger, SinkConfig(path=str(tmp_path), commit_every="5")) as sink:
            sink.write([output_row(row, sample=sample) for row, sample in pairs], None)
        publish_rows(ledger, 27, rows_per_part=10)
    table = read_folder(tmp_path / "completions").select(["row_id", "sample"]).to_pydict()
    assert list(zip(table["row_id"], table["sample"], strict=True)) == sorted(pairs)


def test_completion_order_keeps_the_order_of_the_parts(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [8, 9])
        commit_rows(ledger, [1, 0])
        publish_rows(ledger, 4, order="completion", rows_per_part=3)
    assert row_ids_of(tmp_path / "completions") == [8, 9, 0, 1]


def test_statistics_are_published_in_order_of_attempt_and_step(tmp_path):
    for attempt in range(2):
        with open_ledger(tmp_path) as ledger:
            commit_rows(ledger, [attempt], steps=3)
    with open_ledger(tmp_path) as ledger:
        publish_rows(ledger, 2, rows_per_part=4)
    assert len(os.listdir(tmp_path / "stats")) == 2
    table = read_folder(tmp_path / "stats")
    assert table.schema == STATS_SCHEMA
    assert table.column("attempt").to_pylist() == [1, 1, 1, 2, 2, 2]
    assert table.column("step").to_pylist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("order", ["input", "completion"])
def test_no_rows_give_one_empty_readable_file(tmp_path, order):  # trap 54
    with open_ledger(tmp_path) as ledger:
        publish_rows(ledger, 0, order=order)
        assert ledger.is_complete
    for folder, schema in (("completions", SCHEMA), ("stats", STATS_SCHEMA)):
        assert os.listdir(tmp_path / folder) == ["shard-00000-part-00000.parquet"]
        table = read_folder(tmp_path / folder)
        assert table.num_rows == 0
        assert table.schema == schema


def test_the_summary_is_kept_as_json_under_the_shards_name_with_the_seconds_of_publishing(tmp_path):
    with open_ledger(tmp_path, shard_index=3) as ledger:
        given = job_summary(rows=0)
        written = publish(ledger, SinkConfig(path=str(tmp_path)), expected_rows=0, summary=given)
    assert os.listdir(tmp_path / "summary") == ["shard-00003.json"]
    kept = json.loads((tmp_path / "summary" / "shard-00003.json").read_text())
    assert kept == dataclasses.asdict(written)
    assert written.seconds["publish"] >= 0
    assert dataclasses.replace(written, seconds=given.seconds) == given


def test_a_summary_that_is_missing_is_made_again_at_the_next_start(tmp_path):
    with open_ledger(tmp_path) as ledger:
        publish_rows(ledger, 0)
    path = tmp_path / "summary" / "shard-00000.json"
    before = path.read_bytes()
    path.unlink()
    open_ledger(tmp_path).close()
    assert path.read_bytes() == before


def test_an_output_folder_named_like_a_home_folder_is_read_where_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("~no_such_user")
    with open_ledger(out) as ledger:
        commit_rows(ledger, [1, 0])
        publish_rows(ledger, 2)
    assert row_ids_of(tmp_path / out / "completions") == [0, 1]


def test_missing_rows_are_refused_and_nothing_is_published(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0, 1])
        with pytest.raises(LedgerError, match="2 output rows are committed, 3 were expected"):
            publish_rows(ledger, 3)
        assert not ledger.is_complete
    assert not (tmp_path / "completions").exists()


def test_a_row_committed_twice_is_refused(tmp_path):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0, 1])
        commit_rows(ledger, [1])
        with pytest.raises(LedgerError, match="row 1, sample 0 is committed twice"):
            publish_rows(ledger, 3)


@pytest.mark.parametrize("place", [0.02, 0.1, 0.5])
def test_a_damaged_part_is_refused(tmp_path, place):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, range(500))
        path = tmp_path / "_parts" / "shard-00000-part-00000.parquet"
        content = bytearray(path.read_bytes())
        start = int(len(content) * place)
        content[start : start + 8] = bytes(byte ^ 0xFF for byte in content[start : start + 8])
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"part-00000\.parquet is damaged"):
            publish_rows(ledger, 500)
    assert os.listdir(tmp_path / "_parts")


@pytest.mark.parametrize("compression", ["snappy", "gzip", "lz4", "none"])
def test_every_accepted_compression_is_written(tmp_path, compression):
    with open_ledger(tmp_path) as ledger:
        commit_rows(ledger, [0, 1], config=SinkConfig(path=str(tmp_path), compression=compression))
        publish_rows(ledger, 2, compression=compression)
    assert row_ids_of(tmp_path / "completions") == [0, 1]
