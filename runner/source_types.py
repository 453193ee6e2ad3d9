"""Arrow types of source columns: one plain type for each, and one type for a column of several files."""

from __future__ import annotations

import pyarrow as pa


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type under which a column is read: without view layouts, at any depth.

    Views hold the same values in another layout, which Arrow's selection kernels do not handle everywhere.
    """
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, plain_type(kind.value_type), kind.ordered)
    return kind


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A schema whose columns have their plain types, without metadata."""
    return pa.schema([_plain_field(field).remove_metadata() for field in schema])


def merged_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both exactly, None where there is none."""
    if one == other:
        return one
    one, other = _without_dictionary(one), _without_dictionary(other)
    fields = [pa.schema([pa.field("x", each)]) for each in (one, other)]
    try:
        merged = pa.unify_schemas(fields, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None
    return merged if _holds(merged, one) and _holds(merged, other) else None


def cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array under another type. Raises ArrowException where a value does not fit it."""
    return array if array.type == kind else array.cast(kind)


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    """Without dictionary encoding, which Arrow does not unify with plain types."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _holds(merged: pa.DataType, kind: pa.DataType) -> bool:
    """Whether every value of `kind` is, exactly and as the same sort of value, one of `merged`."""
    if merged == kind or pa.types.is_null(kind):
        return True
    if pa.types.is_integer(kind):
        return bool(pa.types.is_integer(merged)) and _holds_integers(merged, kind)
    if pa.types.is_floating(kind):
        return bool(pa.types.is_floating(merged)) and merged.bit_width >= kind.bit_width
    if pa.types.is_decimal(kind):
        return bool(pa.types.is_decimal(merged)) and _holds_decimals(merged, kind)
    if pa.types.is_struct(kind):
        return bool(pa.types.is_struct(merged)) and all(
            _holds(merged.field(field.name).type, field.type) for field in kind.fields
        )
    if pa.types.is_map(kind):
        return (
            bool(pa.types.is_map(merged))
            and _holds(merged.key_type, kind.key_type)
            and _holds(merged.item_type, kind.item_type)
        )
    if hasattr(kind, "value_type") and hasattr(merged, "value_type"):
        return _holds(merged.value_type, kind.value_type)
    return True  # text in larger text or in bytes, times in finer units: a value too far is refused by the cast


def _holds_integers(merged: pa.DataType, kind: pa.DataType) -> bool:
    """An unsigned integer needs one bit more where the type is signed."""
    signed, was_signed = pa.types.is_signed_integer(merged), pa.types.is_signed_integer(kind)
    if signed == was_signed:
        return bool(merged.bit_width >= kind.bit_width)
    return bool(signed and merged.bit_width > kind.bit_width)


def _holds_decimals(merged: pa.DataType, kind: pa.DataType) -> bool:
    """Enough digits after the point and before it."""
    return bool(merged.scale >= kind.scale and merged.precision - merged.scale >= kind.precision - kind.scale)
