"""What rows are called by the random generator where the source names them itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from runner.output_schema import plain_type

_BY_ID, _BY_ROW, _REPEAT = b"id", b"row", b"repeat"


def draw_ids(
    ids: pa.ChunkedArray, row_ids: npt.NDArray[np.int64], prompts: Sequence[npt.NDArray[np.int32]]
) -> npt.NDArray[np.int64]:
    """One 64-bit number for each of some rows that have a prompt, int64 [rows].

    `ids` are their values of the id column, of any type that a source has, `prompts` their token ids (int32
    [tokens] each). The number is a hash of id and prompt: it stays with the row in whatever order and beside
    whatever others rows stand. A row without an id takes a hash of its row id. Values are hashed as Arrow
    holds them, so no id is beyond what Python can hold.

    Rows equal in both id and prompt are told apart by the order in which they stand here, or equal prompts
    would get equal completions. After an interruption only those still to do stand here: which of such rows
    has which completion may then change, and one may repeat that of a row done before.
    """
    seen: dict[bytes, int] = {}
    digests = []
    for name, row_id, prompt in zip(_id_bytes(ids), row_ids.tolist(), prompts, strict=True):
        if name is None:
            digests.append(_digest(_BY_ROW, row_id.to_bytes(8, "little", signed=True)))
            continue
        digest = _digest(_BY_ID, name, np.ascontiguousarray(prompt, "<i4").tobytes())
        repeats = seen.get(digest, 0)
        seen[digest] = repeats + 1
        digests.append(_digest(_REPEAT, digest, repeats.to_bytes(8, "little")) if repeats else digest)
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def _digest(*parts: bytes) -> bytes:
    """Eight bytes; each part goes in with its length, so that no two lists of parts read the same."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _id_bytes(ids: pa.ChunkedArray) -> Iterator[bytes | None]:
    """Every id as bytes that depend on its value alone, None for null."""
    for chunk in ids.chunks:
        plain = _plain(chunk)
        if pa.types.is_integer(plain.type):
            yield from (None if each is None else each.to_bytes(9, "little", signed=True) for each in plain.to_pylist())
        elif pa.types.is_large_binary(plain.type):
            yield from plain.to_pylist()
        else:
            yield from (_ipc_bytes(plain, at) if plain[at].is_valid else None for at in range(len(plain)))


def _plain(ids: pa.Array) -> pa.Array:
    """The ids as integers or bytes, where their type is one that these hold; never by way of floats."""
    kind = ids.type
    if isinstance(ids, pa.ExtensionArray):
        return _plain(ids.storage)
    if pa.types.is_dictionary(kind):
        return _plain(ids.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return ids.cast(pa.large_binary())
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return ids.cast(pa.large_binary())
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return ids.cast(pa.int32())
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return ids.cast(pa.int64())
    return ids.cast(plain_type(kind))  # no dictionaries within: their indices differ from file to file


def _ipc_bytes(ids: pa.Array, at: int) -> bytes:
    """One value of any type in Arrow's own format, copied so that nothing of its neighbours is left."""
    one = ids.take(pa.array([at]))
    return pa.record_batch([one], names=[""]).serialize().to_pybytes()
