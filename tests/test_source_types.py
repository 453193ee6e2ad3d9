"""One type for a column of several files, and types without views."""

from __future__ import annotations

import os
import signal
from typing import Any

import pyarrow as pa
import pytest

from runner.job import RowFlow
from runner.source_types import cast, merged_type, without_views
from tests.job_runs import TinyJob
from tests.source_rows import write_parquet

TEXT = pa.string_view()


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.uint8(), pa.uint64(), pa.uint64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.null(), pa.date32(), pa.date32()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.binary(4), pa.binary(), pa.binary()),
        (pa.decimal128(5, 1), pa.decimal128(10, 3), pa.decimal128(10, 3)),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.int64())),
        (pa.list_(pa.int32(), 2), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), pa.struct([("a", pa.int16())])),
    ],
)
def test_types_of_one_sort_have_one_that_holds_both(one: pa.DataType, other: pa.DataType, merged: pa.DataType) -> None:
    # trap 44
    assert merged_type(one, other) == merged
    assert merged_type(other, one) == merged


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.float64()),
        (pa.int8(), pa.float64()),
        (pa.decimal128(38, 1), pa.float64()),
        (pa.decimal128(5, 1), pa.float32()),
        (pa.int64(), pa.uint64()),
        (pa.int8(), pa.uint64()),
        (pa.decimal128(5, 1), pa.int64()),
        (pa.decimal256(60, 1), pa.int8()),
        (pa.bool_(), pa.int64()),
        (pa.string(), pa.int64()),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
    ],
)
@pytest.mark.parametrize(
    "within",
    [
        lambda kind: kind,
        pa.list_,
        lambda kind: pa.struct([("a", kind)]),
        lambda kind: pa.map_(pa.string(), kind),
        lambda kind: pa.list_(pa.struct([("a", pa.large_list(kind))])),
    ],
)
def test_types_that_none_holds_exactly_have_none(one: pa.DataType, other: pa.DataType, within: object) -> None:
    # trap 55
    assert callable(within)
    assert merged_type(within(one), within(other)) is None
    assert merged_type(within(other), within(one)) is None


@pytest.mark.parametrize(
    ("kind", "plain", "values"),
    [
        (TEXT, pa.large_string(), ["a", None]),
        (pa.binary_view(), pa.large_binary(), [b"a", None]),
        (pa.list_(TEXT), pa.list_(pa.large_string()), [["a", None], None]),
        (pa.list_(TEXT, 1), pa.list_(pa.large_string(), 1), [["a"], None]),
        (pa.large_list(TEXT), pa.large_list(pa.large_string()), [["a"], None]),
        (pa.list_view(pa.int32()), pa.list_(pa.int32()), [[1, None], [], None]),
        (pa.large_list_view(TEXT), pa.large_list(pa.large_string()), [["a"], [], None]),
        (pa.struct([("a", TEXT)]), pa.struct([("a", pa.large_string())]), [{"a": "x"}, None]),
        (pa.map_(TEXT, TEXT), pa.map_(pa.large_string(), pa.large_string()), [[("k", "v")], None]),
        (pa.int64(), pa.int64(), [1]),
    ],
)
def test_views_become_plain_types_with_the_same_values(kind: pa.DataType, plain: pa.DataType, values: list) -> None:
    assert without_views(kind) == plain
    assert without_views(plain) == plain
    assert cast(pa.array(values, kind), plain).to_pylist() == values


INT_VIEW = pa.list_view(pa.int32())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (INT_VIEW, [None, [1, 2], [], [None], [3], None]),
        (pa.list_view(INT_VIEW), [None, [[1], None, []], [], [[2, 3]], None]),
        (pa.struct([("a", INT_VIEW)]), [None, {"a": [1]}, {"a": None}, {"a": []}, {"a": [2, 3]}]),
        (pa.list_(pa.struct([("a", INT_VIEW)])), [None, [{"a": [1]}, None], [], [{"a": [2]}]]),
        (pa.list_(INT_VIEW, 2), [None, [[1], None], [[], [2, 3]]]),
        (pa.map_(TEXT, INT_VIEW), [None, [("a", [1]), ("b", None)], [], [("c", [2, 3])]]),
    ],
)
def test_list_views_become_lists_wherever_they_are_cut(kind: pa.DataType, values: list) -> None:
    array = pa.array(values, kind)
    for start in range(len(values)):
        for stop in range(start, len(values) + 1):
            found = cast(array[start:stop], without_views(kind))
            found.validate(full=True)
            assert found.type == without_views(kind)
            assert found.to_pylist() == values[start:stop]
            assert found.take(pa.array(range(len(found)), pa.int64())).to_pylist() == values[start:stop]


def test_dictionaries_stay_but_for_their_views() -> None:
    plain = pa.dictionary(pa.int8(), pa.string())
    assert without_views(plain) == plain
    assert without_views(pa.dictionary(pa.int8(), TEXT)) == pa.dictionary(pa.int8(), pa.large_string())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    return TinyJob(tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize(
    ("prompt", "kind", "value"),
    [
        ("column", TEXT, "{row} is a row"),
        ("token_ids_column", INT_VIEW, [1, 2]),
        ("token_ids_column", pa.large_list_view(pa.int32()), [1, 2]),
    ],
)
def test_a_job_over_views_goes_on_after_an_interruption(
    job: TinyJob, monkeypatch: pytest.MonkeyPatch, prompt: str, kind: pa.DataType, value: Any
) -> None:
    rows = range(20)
    ids, tags = [f"id {row}" for row in rows], [[f"tag {row}"] for row in rows]
    values = [value.format(row=row) if isinstance(value, str) else value for row in rows]
    kept = {"tags": pa.array(tags, pa.list_(TEXT)), "numbers": pa.array([[row] for row in rows], INT_VIEW)}
    table = pa.table({"question": pa.array(values, kind), "key": pa.array(ids, TEXT), **kept})
    write_parquet(job.folder / "rows.parquet", table)
    given = [
        *(
            "prompt.column=null",
            f"prompt.{prompt}=question",
            "source.id_column=key",
            "sink.keep_columns=[tags,numbers]",
        ),
        *("sampling.max_tokens=4", "sampling.ignore_eos=true", "engine.max_seqs=3"),
    ]
    out = f"{prompt}-{str(kind).partition('<')[0]}"
    interrupt_after(9, monkeypatch)
    assert job.run(out, *given).code == 75
    monkeypatch.undo()
    assert list((job.folder / out / "_parts").glob("*.parquet"))
    found = job.run(out, *given)
    assert found.code == 0
    assert [(row["id"], row["tags"], row["numbers"]) for row in found.completions] == list(
        zip(ids, tags, [[row] for row in rows], strict=True)
    )


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process told to stop once a job has made some steps."""
    step, done = RowFlow._step, iter(range(1, 1000))

    def counted(flow: RowFlow) -> None:
        step(flow)
        if next(done) == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RowFlow, "_step", counted)
