"""JSON lines as a stream of batches."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow as pa
import pytest

from runner.source import SourceError
from tests.source_rows import BIG_ID, open_path, read, texts, write_lines


def test_integers_stay_exact_beside_nulls_and_late_columns(tmp_path: Path) -> None:  # trap 55
    path = write_lines(
        tmp_path / "a.jsonl", {"id": None}, "", {"id": BIG_ID}, {"id": -(2**63), "late": {"at": 2**63 - 1}}
    )
    source = open_path(path)
    assert source.schema.field("id").type == pa.int64()
    assert [row["id"] for _, row in read(source, "id")] == [None, BIG_ID, -(2**63)]
    assert [row["late"] for _, row in read(source, "late")] == [None, None, {"at": 2**63 - 1}]


def test_text_that_looks_like_a_time_stays_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "2024-01-01 00:00:00"}, {"text": "é \u2028 \ud83d\ude00"})
    assert texts(open_path(path)) == ["2024-01-01 00:00:00", "é \u2028 😀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x"}', "column 'id' holds text here and a number before"),
        ('{"id": true}', "column 'id' holds true/false here and a number before"),
        ('{"id": 9223372036854775808}', "beyond a 64-bit integer"),
        ('{"id": 0.5}', "mixes decimals and the integer 9007199254740993"),
        ('{"id": [1, "x"]}', "column 'id' holds a list here"),
        ('{"nested": [{"a": "x"}]}', r"column 'nested\[\]\.a' holds text here"),
        ('{"id": 1', "not a line of JSON"),
        ('{"id": NaN}', "NaN is not JSON"),
        ('{"text": "\\ud800"}', "surrogates not allowed"),
        ("[1]", "one JSON object"),
        ('{"score": 1e400}', "the number 1e400 is beyond a 64-bit floating point number"),
        ('{"score": -1e400}', "the number -1e400 is beyond"),
        ('{"id": 1, "id": 2}', "an object has the key 'id' twice"),
        ('{"nested": [{"a": 1, "b": 2, "a": 1}]}', "an object has the key 'a' twice"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"id": BIG_ID, "nested": [{"a": 1}]}, "", line)
    with pytest.raises(SourceError, match=rf"a\.jsonl, line 3: .*{message}"):
        open_path(path)


def test_bytes_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(SourceError, match="line 2"):
        open_path(tmp_path / "a.jsonl")


def test_small_integers_and_decimals_make_a_decimal_column(tmp_path: Path) -> None:
    source = open_path(write_lines(tmp_path / "a.jsonl", {"score": 1}, {"score": 2.5}))
    assert [row["score"] for _, row in read(source, "score")] == [1.0, 2.5]


def test_many_lines_stream_in_batches_with_skip_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.source_jsonl.MAX_BATCH_ROWS", 4)
    for part in range(2):
        rows = [{"text": f"{part}.{row}"} for row in range(10)]
        write_lines(tmp_path / f"{part}.jsonl", *rows)
    source = open_path(tmp_path)
    everything = [(10 * part + row, {"text": f"{part}.{row}"}) for part in range(2) for row in range(10)]
    assert max(batch.table.num_rows for batch in source.batches(["text"], 0, None)) == 4
    for skip in (0, 3, 9, 10, 13, 20, 99):
        for limit in (None, 0, 1, 9, 99):
            stop = None if limit is None else skip + limit
            assert read(source, "text", skip=skip, limit=limit) == everything[skip:stop]


def test_compressed_lines_are_read_and_truncated_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"text": "packed"}\r\n' * 1 + b'{"text": "no newline"}'))
    assert texts(open_path(path)) == ["packed", "no newline"]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(SourceError, match="truncated"):
        open_path(path)


@pytest.mark.parametrize(
    "after", [range(10), range(50), range(30, 60), [*range(29), 7], [*range(15), "x", *range(16, 30)], []]
)
@pytest.mark.parametrize("limit", [None, 5])
def test_a_file_that_changes_after_it_was_opened_is_refused(
    tmp_path: Path, after: list[int], limit: int | None
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"{row:02d}"} for row in range(30)))
    source = open_path(path)
    write_lines(path, *({"text": f"{row:>02}"} for row in after))
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while the job was reading it"):
        texts(source, limit=limit)


def test_a_type_that_changes_after_the_file_was_opened_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "x"})
    source = open_path(path)
    write_lines(path, {"text": 1})
    with pytest.raises(SourceError, match=r"a\.jsonl: changed"):
        texts(source)


def test_where_a_line_is_not_json_is_told_by_its_own_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "unfinished\n{"text" 1}\n')
    with pytest.raises(SourceError) as caught:
        open_path(tmp_path / "a.jsonl")
    assert re.findall(r"line \d+|column \d+|char \d+", str(caught.value)) == ["line 2", "column 10"]


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "x"})
    source = open_path(path)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl: cannot be read"):
        texts(source)
