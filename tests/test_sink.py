import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.config import SinkConfig
from runner.output_schema import STATS_SCHEMA, completion_schema
from runner.sink import Sink
from runner.storage import StorageError
from tests.output_rows import (
    SCHEMA,
    error_row,
    int32,
    open_ledger,
    output_row,
    publish_rows,
    read_folder,
    row_ids_of,
    step_stats,
)


def config(out: Path, **keys: object) -> SinkConfig:
    return SinkConfig(path=str(out), **keys)


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith((".", "_")))


def records(out: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((out / "_commits").glob("*-part-*.json"))]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_is_sorted_and_recorded_with_its_files(tmp_path):
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.write([output_row(5), output_row(2, sample=1), error_row(9), output_row(2)], None)
        sink.record_step(step_stats(0))
    assert visible(tmp_path / "_parts") == ["shard-00000-part-00000.parquet", "shard-00000-stats-00000.parquet"]
    table = pq.read_table(tmp_path / "_parts" / "shard-00000-part-00000.parquet")
    assert list(zip(*table.select(["row_id", "sample"]).to_pydict().values(), strict=True)) == [
        (2, 0),
        (2, 1),
        (5, 0),
        (9, 0),
    ]
    assert table.schema == SCHEMA
    assert table.slice(3).to_pylist()[0] == {
        "row_id": 9,
        "sample": 0,
        "completion": None,
        "finish_reason": "error",
        "error": "too long",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 0,
    }
    (record,) = records(tmp_path)
    content = (tmp_path / "_parts" / record["completions"]["name"]).read_bytes()
    assert record["completions"] == {
        "name": "shard-00000-part-00000.parquet",
        "rows": 4,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert record["totals"] == {
        "rows": 3,
        "completions": 4,
        "errors": 1,
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 9,
    }
    assert (record["attempt"], record["first_row_id"], record["last_row_id"]) == (1, 2, 9)
    assert record["fingerprint"] == ledger.fingerprint_digest


def test_steps_are_written_with_attempt_and_live_share(tmp_path):
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.record_step(step_stats(0))
        sink.record_step(step_stats(1, blocks_live=10))
    table = pq.read_table(tmp_path / "_parts" / "shard-00000-stats-00000.parquet")
    assert table.schema == STATS_SCHEMA
    assert table.column("attempt").to_pylist() == [1, 1]
    assert table.column("live_fraction").to_pylist() == [0.5, 1.0]
    assert table.column("started_at").cast(pa.int64()).to_pylist() == [1_700_000_000_000_000, 1_700_000_000_000_001]


def test_token_ids_prompt_id_and_kept_columns_stay_with_their_row(tmp_path):
    schema = completion_schema(
        id_field=pa.field("doc", pa.string()),
        kept=[pa.field("label", pa.dictionary(pa.int8(), pa.string())), pa.field("size", pa.int16())],
        token_ids=True,
        prompt=True,
    )
    carried = pa.record_batch(
        {
            "doc": ["d3", "d1", "d2"],
            "label": pa.array(["x", None, "y"]).dictionary_encode(),
            "size": pa.array([3, 1, 2], pa.int16()),
        }
    )
    rows = [
        output_row(3, token_ids=int32(7, 8), prompt="p3"),
        output_row(1, token_ids=int32(), prompt="p1"),
        output_row(2, token_ids=None, prompt=None),
    ]
    with open_ledger(tmp_path, schema=schema) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.write(rows, carried)
    table = pq.read_table(tmp_path / "_parts" / "shard-00000-part-00000.parquet")
    assert table.schema == schema
    assert table.select(["id", "token_ids", "prompt", "label", "size"]).to_pydict() == {
        "id": ["d1", "d2", "d3"],
        "token_ids": [[], None, [7, 8]],
        "prompt": ["p1", None, "p3"],
        "label": [None, "y", "x"],
        "size": [1, 2, 3],
    }


def test_a_kept_column_may_be_named_prompt_or_token_ids(tmp_path):
    kept = [pa.field("prompt", pa.string()), pa.field("token_ids", pa.int64())]
    schema = completion_schema(id_field=None, kept=kept, token_ids=False, prompt=False)
    with open_ledger(tmp_path, schema=schema) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.write([output_row(0)], pa.record_batch({"prompt": ["source text"], "token_ids": [4]}))
    table = pq.read_table(tmp_path / "_parts" / "shard-00000-part-00000.parquet")
    assert table.select(["prompt", "token_ids"]).to_pylist() == [{"prompt": "source text", "token_ids": 4}]


def test_an_all_null_column_in_one_part_and_text_in_the_next_have_one_schema(tmp_path):  # trap 44
    kept = [pa.field("note", pa.null()), pa.field("tags", pa.list_(pa.string()))]
    schema = completion_schema(id_field=None, kept=kept, token_ids=False, prompt=False)
    parts = tmp_path / "_parts"
    with open_ledger(tmp_path, schema=schema) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.write([error_row(0)], pa.record_batch({"note": pa.nulls(1), "tags": pa.nulls(1)}))
        sink.commit()
        sink.write([output_row(1)], pa.record_batch({"note": pa.array(["text"]), "tags": pa.array([["a", "b"]])}))
        sink.commit()
        for number in range(2):
            assert pq.read_schema(parts / f"shard-00000-part-0000{number}.parquet") == schema
        publish_rows(ledger, 2)
    table = read_folder(tmp_path / "completions")
    assert table.select(["completion", "error", "note", "tags"]).to_pylist() == [
        {"completion": None, "error": "too long", "note": None, "tags": None},
        {"completion": "answer 1", "error": None, "note": "text", "tags": ["a", "b"]},
    ]


def test_ids_above_2_to_53_with_nulls_stay_exact(tmp_path):  # trap 55
    ids = [2**53 + 1, None, 2**63 - 1, -(2**53) - 1]
    schema = completion_schema(
        id_field=pa.field("doc", pa.int64()), kept=[pa.field("doc", pa.int64())], token_ids=False, prompt=False
    )
    with open_ledger(tmp_path, schema=schema) as ledger, Sink(ledger, config(tmp_path, commit_every="2")) as sink:
        column = pa.array(ids, pa.int64())
        sink.write([output_row(row) for row in range(4)], pa.record_batch({"id": column, "doc": column}))
        publish_rows(ledger, 4)
    table = read_folder(tmp_path / "completions")
    assert table.column("id").to_pylist() == ids
    assert table.column("doc").to_pylist() == ids


def test_rows_are_committed_every_so_many(tmp_path):
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path, commit_every="4")) as sink:
        sink.write([output_row(row) for row in range(3)], None)
        assert ledger.next_part == 0
        sink.write([output_row(row) for row in range(3, 10)], None)
        assert [record["totals"]["rows"] for record in records(tmp_path)] == [4, 4]
    assert [record["totals"]["rows"] for record in records(tmp_path)] == [4, 4, 2]


def test_rows_are_committed_every_so_many_seconds(tmp_path):
    clock = Clock()
    with open_ledger(tmp_path) as ledger:
        sink = Sink(ledger, config(tmp_path, commit_every="60s"), clock=clock)
        sink.write([output_row(0)], None)
        clock.now = 59.0
        sink.record_step(step_stats(0))
        assert ledger.next_part == 0
        clock.now = 60.0
        sink.record_step(step_stats(1))
        assert ledger.next_part == 1
        clock.now = 180.0
        sink.record_step(step_stats(2))
        assert ledger.next_part == 1, "there is no row to save"
        sink.write([output_row(1)], None)
        assert ledger.next_part == 2


def test_a_part_never_holds_more_than_rows_per_part(tmp_path):
    keys = {"rows_per_part": 3, "commit_every": "100"}
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path, **keys)) as sink:
        sink.write([output_row(row) for row in range(7)], None)
    assert [record["totals"]["rows"] for record in records(tmp_path)] == [3, 3, 1]


def test_long_texts_are_committed_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.sink._MAX_BUFFERED_BYTES", 1000)
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.write([output_row(0, completion="x" * 900)], None)
        assert ledger.next_part == 0
        sink.write([output_row(1, completion="x" * 900)], None)
        assert ledger.next_part == 1


def test_steps_after_the_last_row_are_kept(tmp_path):
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path, commit_every="1")) as sink:
        sink.write([output_row(0)], None)
        sink.record_step(step_stats(0))
        sink.commit()
        publish_rows(ledger, 1)
    assert read_folder(tmp_path / "stats").column("step").to_pylist() == [0]


def test_an_empty_sink_commits_nothing(tmp_path):
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path)) as sink:
        sink.commit()
    assert records(tmp_path) == []


def fail_after_a_commit(out: Path, error: BaseException) -> None:
    with open_ledger(out) as ledger, Sink(ledger, config(out)) as sink:
        sink.write([output_row(0)], None)
        sink.commit()
        sink.write([output_row(1)], None)
        raise error


@pytest.mark.parametrize(
    ("error", "kept"),
    [(RuntimeError(), [0, 1]), (StorageError(Path("x"), OSError()), [0]), (KeyboardInterrupt(), [0])],
)
def test_finished_rows_are_kept_unless_storage_failed_or_it_is_to_end_at_once(tmp_path, error, kept):
    with pytest.raises(type(error)):
        fail_after_a_commit(tmp_path, error)
    with open_ledger(tmp_path) as ledger:
        assert ledger.committed_rows().tolist() == kept


_FULL_DISK = """
import sys, resource
from pathlib import Path
from tests.output_rows import open_ledger, output_row
from runner.config import SinkConfig
from runner.sink import Sink
from runner.storage import StorageError

out = Path(sys.argv[1])
with open_ledger(out) as ledger:
    sink = Sink(ledger, SinkConfig(path=str(out), compression="none"))
    sink.write([output_row(0)], None)
    sink.commit()
    sink.write([output_row(row, completion="x" * 100) for row in range(1, 1000)], None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # write() fails from here as on a full disk
    try:
        sink.commit()
    except StorageError as error:
        print(error)
        sys.exit(74)
"""


def test_a_full_disk_loses_only_the_part_being_written(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    job = [sys.executable, "-c", _FULL_DISK, str(tmp_path)]
    full = subprocess.run(job, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert full.returncode == 74, full.stderr
    assert "shard-00000-part-00001.parquet" in full.stdout
    assert os.listdir(tmp_path / "_parts") == ["shard-00000-part-00000.parquet"]
    with open_ledger(tmp_path) as ledger:
        assert ledger.committed_rows().tolist() == [0]
        with Sink(ledger, config(tmp_path)) as sink:
            sink.write([output_row(row) for row in range(1, 1000)], None)
        publish_rows(ledger, 1000)
    assert row_ids_of(tmp_path / "completions") == list(range(1000))


@pytest.mark.parametrize(
    ("keys", "part_rows"),
    [({"rows_per_part": 7}, [6, 6, 3]), ({"rows_per_part": 1}, [3] * 5), ({"commit_every": "2"}, [6, 6, 3])],
)
def test_all_samples_of_a_row_go_into_one_part(tmp_path: Path, keys: dict[str, object], part_rows: list[int]):
    # trap 45
    rows = [output_row(row, sample=sample) for row in (4, 2, 0, 3, 1) for sample in (1, 2, 0)]
    with open_ledger(tmp_path) as ledger, Sink(ledger, config(tmp_path, **keys), samples=3) as sink:
        sink.write(rows[:3], None)
        sink.write(rows[3:], None)
    parts = [pq.read_table(path, columns=["row_id"]).column(0).to_pylist() for path in ledger.completion_parts]
    assert [len(part) for part in parts] == part_rows
    assert all(part.count(row) == 3 for part in parts for row in part)
    assert (ledger.totals.rows, ledger.totals.completions, ledger.totals.prompt_tokens) == (5, 15, 50)
