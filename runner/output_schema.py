"""The columns of the output: one fixed Arrow schema for completions, one for step statistics."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from runner.config import ConfigError

ID_COLUMN = "id"

_MAX_SHOWN = 200


def completion_schema(
    *, id_field: pa.Field | None, kept: Sequence[pa.Field], token_ids: bool, prompt: bool
) -> pa.Schema:
    """The schema of every completion file of a run.

    Args:
        id_field: the source column that becomes `id`, None without `source.id_column`.
        kept: the source columns that follow the output's own, under their names.
        token_ids: whether the output's token ids are a column.
        prompt: whether the rendered prompt is a column.

    Raises:
        ConfigError: a kept column is named twice or like a column of the output, or a column's type
            cannot be stored in Parquet.
    """
    own = [("row_id", pa.int64())]
    if id_field is not None:
        own.append((ID_COLUMN, _stored_type("source.id_column", id_field)))
    own += [
        ("sample", pa.int32()),
        ("completion", pa.large_string()),
        ("finish_reason", pa.string()),
        ("error", pa.large_string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
    ]
    if token_ids:
        own.append(("token_ids", pa.list_(pa.int32())))
    if prompt:
        own.append(("prompt", pa.large_string()))
    _refuse_clashes([name for name, _ in own], [field.name for field in kept])
    return pa.schema([*own, *((field.name, _stored_type("sink.keep_columns", field)) for field in kept)])


def _refuse_clashes(own: Sequence[str], kept: Sequence[str]) -> None:
    """Every name in the output must mean one column."""
    for index, name in enumerate(kept):
        if name in own:
            raise ConfigError(
                "sink.keep_columns",
                name,
                f"names other than the output's own: the source column {name!r} would clash with the output column "
                f"{name!r} (its columns are {', '.join(own)}); leave it out, or rename it in the source",
            )
        if name in kept[:index]:
            raise ConfigError("sink.keep_columns", name, "each column once")


def _stored_type(key: str, field: pa.Field) -> pa.DataType:
    """The type a source column has in every file, as Parquet gives it back (seconds become milliseconds)."""
    file = io.BytesIO()
    try:
        pq.write_table(pa.schema([(field.name, plain_type(field.type))]).empty_table(), file)
        file.seek(0)
        return pq.read_schema(file).field(0).type
    # A type nested too deep is an OSError of Parquet's, and deeper still a RecursionError.
    except (pa.ArrowException, OSError, RecursionError) as error:
        kind = str(field.type)
        shown = kind if len(kind) <= _MAX_SHOWN else f"{kind[:_MAX_SHOWN]}…"
        accepted = f"columns that Parquet can store; {field.name!r} has type {shown}: {error}"
        raise ConfigError(key, field.name, accepted) from error


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type that does not depend on the values of one part: no dictionaries, nulls or string views.

    A column that is null throughout becomes large_string.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_null(kind):
        return pa.large_string()
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field.with_type(plain_type(kind.key_type)), _plain_field(kind.item_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


STATS_SCHEMA = pa.schema(
    [
        ("attempt", pa.int64()),
        ("step", pa.int64()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("duration_us", pa.int64()),
        ("running", pa.int64()),
        ("waiting", pa.int64()),
        ("prefill_tokens", pa.int64()),
        ("decode_tokens", pa.int64()),
        ("dropped_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("recomputed_tokens", pa.int64()),
        ("inflight_hit_tokens", pa.int64()),
        ("blocks_total", pa.int64()),
        ("blocks_live", pa.int64()),
        ("blocks_cached", pa.int64()),
        ("blocks_free", pa.int64()),
        ("live_fraction", pa.float64()),
        ("slack_tokens", pa.int64()),
        ("evictions", pa.int64()),
        ("preemptions", pa.int64()),
        ("gpu_allocated_bytes", pa.int64()),
        ("gpu_reserved_bytes", pa.int64()),
    ]
)
"""One row per launched step: which attempt of the job ran it, then `engine.stats.StepStats`."""
