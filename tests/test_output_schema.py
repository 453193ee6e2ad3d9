import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.stats import StepStats
from runner.config import ConfigError
from runner.output_schema import STATS_SCHEMA, completion_schema, plain_type

OWN = ["row_id", "sample", "completion", "finish_reason", "error", "prompt_tokens", "cached_tokens", "output_tokens"]


def schema_of(
    *kept: pa.Field, id_field: pa.Field | None = None, token_ids: bool = False, prompt: bool = False
) -> pa.Schema:
    return completion_schema(id_field=id_field, kept=kept, token_ids=token_ids, prompt=prompt)


def test_columns_stand_in_the_order_of_the_contract():
    schema = schema_of(
        pa.field("label", pa.string()), id_field=pa.field("doc", pa.uint64()), token_ids=True, prompt=True
    )
    assert schema.names == ["row_id", "id", *OWN[1:], "token_ids", "prompt", "label"]
    assert schema.field("id").type == pa.uint64()
    assert schema.field("completion").type == pa.large_string()
    assert schema.field("token_ids").type == pa.list_(pa.int32())


def test_columns_that_were_not_asked_for_are_absent():
    assert schema_of().names == OWN


def test_a_kept_column_named_like_an_output_column_is_refused_naming_both():
    with pytest.raises(ConfigError, match=r"source column 'completion'.*output column 'completion'"):
        schema_of(pa.field("completion", pa.string()))
    with pytest.raises(ConfigError, match="'id'"):
        schema_of(pa.field("id", pa.int64()), id_field=pa.field("doc", pa.int64()))
    with pytest.raises(ConfigError, match="each column once"):
        schema_of(pa.field("a", pa.int64()), pa.field("a", pa.int64()))


def test_a_kept_column_may_have_the_name_of_an_output_column_that_is_not_written():
    assert schema_of(pa.field("prompt", pa.string()), pa.field("id", pa.int64())).names == [*OWN, "prompt", "id"]


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.null(), pa.large_string()),
        (pa.string_view(), pa.large_string()),
        (pa.binary_view(), pa.large_binary()),
        (pa.list_(pa.dictionary(pa.int32(), pa.string())), pa.list_(pa.string())),
        (pa.large_list(pa.null()), pa.large_list(pa.large_string())),
        (pa.list_(pa.null(), 2), pa.list_(pa.large_string(), 2)),
        (pa.struct([("a", pa.null()), ("b", pa.int8())]), pa.struct([("a", pa.large_string()), ("b", pa.int8())])),
        (pa.map_(pa.string(), pa.null()), pa.map_(pa.string(), pa.large_string())),
        (pa.decimal128(10, 2), pa.decimal128(10, 2)),
        (pa.timestamp("ns", "UTC"), pa.timestamp("ns", "UTC")),
    ],
)
def test_types_that_depend_on_the_values_become_plain(source: pa.DataType, stored: pa.DataType):
    assert plain_type(source) == stored
    assert schema_of(pa.field("kept", source)).field("kept").type == stored


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.date64(), pa.time32("s"), pa.map_(pa.string(), pa.int32())])
def test_a_stored_type_is_what_a_reader_of_the_file_gets(kind: pa.DataType, tmp_path):
    schema = schema_of(pa.field("kept", kind))
    pq.write_table(schema.empty_table(), tmp_path / "file.parquet")
    assert pq.read_schema(tmp_path / "file.parquet") == schema


def test_a_type_that_parquet_cannot_hold_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"sink\.keep_columns: 'nothing'.*struct"):
        schema_of(pa.field("nothing", pa.struct([])))
    with pytest.raises(ConfigError, match=r"source\.id_column: 'nothing'"):
        schema_of(id_field=pa.field("nothing", pa.struct([])))


@pytest.mark.parametrize("depth", [60, 300, 2000])
def test_a_type_nested_too_deep_for_parquet_is_refused_at_start(depth: int):
    kind = pa.int32()
    for _ in range(depth):
        kind = pa.list_(kind)
    with pytest.raises(ConfigError, match=r"sink\.keep_columns: 'deep'.*list<") as caught:
        schema_of(pa.field("deep", kind))
    assert len(str(caught.value)) < 600


def test_the_statistics_hold_the_attempt_and_every_field_of_a_step_but_those_for_the_summary():
    only_summed = ("shared_blocks", "duplicate_blocks", "copied_blocks")
    fields = [field.name for field in dataclasses.fields(StepStats) if field.name not in only_summed]
    assert [name for name in STATS_SCHEMA.names if name not in ("attempt", "live_fraction")] == fields
    assert STATS_SCHEMA.names[0] == "attempt"
    assert STATS_SCHEMA.names[STATS_SCHEMA.names.index("blocks_free") + 1] == "live_fraction"
    assert STATS_SCHEMA.field("started_at").type == pa.timestamp("us", tz="UTC")
