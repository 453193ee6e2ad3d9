"""Arrow types of source columns: no view layouts, and one type for a column of several files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type under which a column is read: without view layouts, at any depth.

    Views hold the same values in another layout, which Arrow's selection kernels do not handle everywhere.
    """
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_field_without_views(field) for field in kind.fields])
    if pa.types.is_map(kind):
        key, item = _field_without_views(kind.key_field), _field_without_views(kind.item_field)
        return pa.map_(key, item, keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_without_views(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_field_without_views(kind.value_field))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_field_without_views(kind.value_field))
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views(kind.value_type), kind.ordered)
    return kind


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """A schema of types without views, and without metadata."""
    return pa.schema([_field_without_views(field).remove_metadata() for field in schema])


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
    """An array under another type, one without views. Raises ArrowException where a value does not fit it."""
    return array if array.type == kind else _without_list_views(array).cast(kind)


def _without_list_views(array: pa.Array) -> pa.Array:
    """The same values in plain lists. Arrow's own cast of list views gives arrays that are not valid."""
    kind = array.type
    if not _has_list_view(kind):
        return array
    if pa.types.is_struct(kind):
        children = [_without_list_views(array.field(at)) for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, names=[field.name for field in kind.fields], mask=array.is_null())
    if pa.types.is_map(kind):
        keys, items = _without_list_views(array.keys), _without_list_views(array.items)
        offsets = pa.array(array.offsets.to_numpy())  # copied, as a mask goes with no slice
        return pa.MapArray.from_arrays(offsets, keys, items, mask=array.is_null())
    values = _without_list_views(array.flatten())
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
    return pa.LargeListArray.from_arrays(offsets, values, mask=array.is_null())


def _has_list_view(kind: pa.DataType) -> bool:
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return True
    return any(_has_list_view(kind.field(at).type) for at in range(kind.num_fields))


def _field_without_views(field: pa.Field) -> pa.Field:
    return field.with_type(without_views(field.type))


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
