"""Parquet files as a stream of batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner import source_batch, source_files
from runner.source import SourceError
from tests.source_rows import BIG_ID, open_path, read, texts, write_parquet


def test_rows_keep_their_ordinal_over_files_row_groups_skip_and_limit(tmp_path: Path) -> None:
    for part in range(3):
        rows = {"text": [f"{part}.{row}" for row in range(10)]}
        write_parquet(tmp_path / f"part-{part}.parquet", rows, row_group_size=4)
    source = open_path(tmp_path)
    everything = [(10 * part + row, {"text": f"{part}.{row}"}) for part in range(3) for row in range(10)]
    assert source.num_rows == 30
    for skip in (0, 3, 4, 9, 10, 17, 29, 30, 99):
        for limit in (None, 0, 1, 5, 12, 99):
            stop = None if limit is None else skip + limit
            assert read(source, "text", skip=skip, limit=limit) == everything[skip:stop]


def test_only_the_asked_columns_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "a.b": [1], "a": [2]})
    assert read(open_path(path), "a") == [(0, {"a": 2})]
    assert read(open_path(path), "a.b", "text") == [(0, {"a.b": 1, "text": "x"})]
    with pytest.raises(SourceError, match=r"no column 'other'.*text, a\.b, a"):
        read(open_path(path), "other")


def test_skipped_row_groups_are_not_decoded(tmp_path: Path) -> None:
    path = damaged_in_first_row_group(tmp_path)
    assert texts(open_path(path), skip=100) == ["b" * 50] * 100


def damaged_in_first_row_group(folder: Path) -> Path:
    rows = {"text": ["a" * 50] * 100 + ["b" * 50] * 100}
    path = write_parquet(
        folder / "a.parquet",
        rows,
        row_group_size=100,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = bytearray(path.read_bytes())
    value = len(b"a" * 50).to_bytes(4, "little") + b"a" * 50
    data[data.index(value + value) + 4] ^= 0xFF  # two in a row are the page itself, not a statistic of it
    path.write_bytes(data)
    return path


def test_a_damaged_page_names_file_and_row_group(tmp_path: Path) -> None:
    path = damaged_in_first_row_group(tmp_path)
    with pytest.raises(SourceError, match=rf"{path}: row group 0 cannot be read"):
        texts(open_path(path))


@pytest.mark.parametrize("keep", [0, 3, -10])
def test_a_truncated_file_is_refused_at_open(tmp_path: Path, keep: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 1000})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=f"{path}: not a readable Parquet file"):
        open_path(path)


def test_batches_stay_small_where_rows_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_batch, "TARGET_BATCH_BYTES", 10_000)
    rows = {"text": [f"{row:1000d}" for row in range(50)], "small": list(range(50))}
    source = open_path(write_parquet(tmp_path / "a.parquet", rows, use_dictionary=False))
    assert max(batch.table.num_rows for batch in source.batches(["text"], 0, None)) <= 10
    assert [batch.table.num_rows for batch in source.batches(["small"], 0, None)] == [50]


def test_nested_dictionary_and_large_types_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "messages": [[{"role": "user", "content": "hi"}], [], None],
            "kind": pa.array(["a", None, "a"]).dictionary_encode(),
            "large": pa.array(["x", "y", None], pa.large_string()),
            "view": pa.array(["x", "y", None], pa.string_view()),
            "ids": pa.array([[1, 2], None, []], pa.large_list(pa.int32())),
        }
    )
    source = open_path(write_parquet(tmp_path / "a.parquet", table))
    assert source.schema.names == table.schema.names
    assert [row for _, row in read(source, *table.schema.names)] == table.to_pylist()


def test_types_that_differ_between_files_become_one(tmp_path: Path) -> None:  # trap 44
    first = {
        "note": pa.nulls(2),
        "id": pa.array([1, None], pa.int32()),
        "text": pa.array(["a", "b"]).dictionary_encode(),
        "tags": pa.array([[], None], pa.list_(pa.null())),
    }
    second = {
        "note": ["written", None],
        "id": [BIG_ID, None],
        "text": pa.array(["c", "d"], pa.large_string()),
        "tags": [["t"], None],
        "extra": [1, 2],
    }
    write_parquet(tmp_path / "1.parquet", first)
    write_parquet(tmp_path / "2.parquet", second)
    source = open_path(tmp_path)
    assert [field.type for field in source.schema] == [
        pa.string(),
        pa.int64(),
        pa.large_string(),
        pa.list_(pa.string()),
    ]
    schemas = {batch.table.schema for batch in source.batches(source.schema.names, 0, None)}
    assert schemas == {source.schema}
    assert [row["note"] for _, row in read(source, "note")] == [None, None, "written", None]
    assert [row["id"] for _, row in read(source, "id")] == [1, None, BIG_ID, None]  # trap 55
    assert texts(source) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.float64()),
        (pa.string(), pa.int64()),
        (pa.list_(pa.int64()), pa.list_(pa.float64())),
        (pa.decimal128(38, 1), pa.float64()),
        (pa.int64(), pa.uint64()),
        (pa.decimal128(5, 1), pa.int64()),
    ],
)
def test_types_that_no_type_holds_exactly_are_refused(tmp_path: Path, first: pa.DataType, second: pa.DataType) -> None:
    # trap 55
    write_parquet(tmp_path / "1.parquet", {"id": pa.nulls(1, first)})
    write_parquet(tmp_path / "2.parquet", {"id": pa.nulls(1, second)})
    with pytest.raises(SourceError, match=r"2\.parquet: column 'id' is .*write all files with one type"):
        open_path(tmp_path)


def test_a_column_missing_from_a_later_file_is_refused_at_open(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", {"text": ["a"], "id": [1]})
    write_parquet(tmp_path / "2.parquet", {"text": ["b"]})
    with pytest.raises(SourceError, match=r"2\.parquet: column 'id' is missing"):
        open_path(tmp_path)


def test_fields_that_differ_in_order_and_number_become_one(tmp_path: Path) -> None:  # trap 44
    write_parquet(tmp_path / "1.parquet", {"x": pa.array([{"a": 1, "b": "x"}])})
    write_parquet(tmp_path / "2.parquet", {"x": pa.array([{"b": "y", "c": True, "a": 2}, None])})
    assert [row["x"] for _, row in read(open_path(tmp_path), "x")] == [
        {"a": 1, "b": "x", "c": None},
        {"a": 2, "b": "y", "c": True},
        None,
    ]


def test_views_are_read_as_plain_types_at_any_depth(tmp_path: Path) -> None:
    text = pa.string_view()
    table = pa.table(
        {
            "text": pa.array(["a", "a text too long for a view", None] * 5, text),
            "bytes": pa.array([b"a", None, b""] * 5, pa.binary_view()),
            "texts": pa.array([["a", None], [], None] * 5, pa.list_(text)),
            "ids": pa.array([None, [1, 2], []] * 5, pa.list_view(pa.int32())),
            "tags": pa.array([["x"], None, ["y", "z"]] * 5, pa.large_list_view(text)),
            "map": pa.array([[("k", "v")], None, []] * 5, pa.map_(text, text)),
            "struct": pa.array([{"a": ["x"]}, None, {"a": None}] * 5, pa.struct([("a", pa.list_(text))])),
        }
    )
    write_parquet(tmp_path / "a.parquet", table, row_group_size=7)
    source = open_path(tmp_path)
    assert "view" not in str(source.schema)
    names = table.schema.names
    assert [row for _, row in read(source, *names)] == table.to_pylist()
    for batch in source.batches(names, 3, None):  # what a resumed job does
        kept = batch.table.filter(pa.array([row % 2 == 0 for row in range(batch.table.num_rows)]))
        assert kept.to_pylist() == batch.table.to_pylist()[::2]


@pytest.mark.parametrize(
    "after",
    [
        {"rows": 10},
        {"rows": 30, "group": 5},
        {"rows": 30, "group": 30},
        {"rows": 60},
        {"rows": 30, "first": 70},
        {"rows": 30, "name": "other"},
        {"rows": 0},
    ],
)
def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path, after: dict[str, Any]) -> None:
    def write(rows: int, group: int = 10, first: int = 10, name: str = "text") -> None:
        values = pa.array([f"r{first + row}" for row in range(rows)], pa.string())
        write_parquet(tmp_path / "a.parquet", {name: values}, row_group_size=group)

    write(30)
    source = open_path(tmp_path / "a.parquet")
    write(**after)
    with pytest.raises(SourceError, match=r"a\.parquet: changed while the job was reading it"):
        texts(source)


def test_a_file_written_over_while_it_is_read_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "row_group_size": 5}
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"{row:04d}" for row in range(20)]}, **options)
    batches = open_path(path).batches(["text"], 0, None)
    next(batches)
    write_parquet(path, {"text": [f"{row:04d}" for row in (*range(15), 18, 17, 16, 15, 19)]}, **options)
    with pytest.raises(SourceError, match="changed while"):
        list(batches)


def test_a_file_written_again_with_the_same_bytes_is_the_same(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    source = open_path(path)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert texts(source) == ["x"]
    assert open_path(path).fingerprint() == source.fingerprint()


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    source = open_path(path)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.parquet: gone"):
        texts(source)


def test_a_row_group_that_has_fewer_rows_than_its_footer_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_path(write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 8}, row_group_size=4))
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *given, **keys: [next(whole(*given, **keys)).slice(1)])
    with pytest.raises(SourceError, match=r"a\.parquet: row group 0 has 3 rows where its footer says 4"):
        texts(source)


def test_values_edited_in_place_change_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(*rows: str) -> dict[str, Any]:
        path = write_parquet(tmp_path / "a.parquet", {"text": ["a", *rows, "z"]}, compression="none")
        os.utime(path, ns=(len(rows), next(clock)))
        return open_path(path).fingerprint()["files"][0]

    clock = iter(range(10))
    first, edited, again = written("bb", "cc"), written("cc", "bb"), written("bb", "cc")
    assert first["size"] == edited["size"]
    assert first["footer_sha256"] == edited["footer_sha256"]
    assert first != edited
    assert first == again
    # Of a file too large to be hashed whole, the time of change tells.
    monkeypatch.setattr(source_files, "HASHED_WHOLE_BYTES", 10)
    monkeypatch.setattr(source_files, "_END_BYTES", 4)
    first, edited = written("bb", "cc"), written("cc", "bb")
    assert first["ends_sha256"] == edited["ends_sha256"]
    assert first != edited


def test_a_column_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "n\u00e9": [1]}, store_schema=False)
    path.write_bytes(path.read_bytes().replace("n\u00e9".encode(), b"n\xff\xfe"))
    with pytest.raises(SourceError, match=r"a\.parquet: the name of a column is not UTF-8"):
        open_path(path)
