"""The arrays of a forward pass, as they are and padded to a captured size."""

from __future__ import annotations

import numpy as np

from engine.batch import Batch, build_batch
from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable
from engine.step_inputs import NOWHERE, input_arrays, padded_arrays


def make_batch() -> Batch:
    table = SequenceTable(4, block_size=4)
    for row, length in enumerate((6, 3)):
        request = Request(row, np.arange(10 * row, 10 * row + length, dtype=np.int32), Sampling())
        table.admit(Sequence(request), np.array([2 * row, 2 * row + 1], np.int32), 0, 30)
    return build_batch(table, table.running, np.array([1, 3]))


def test_padding_tokens_write_nowhere_and_belong_to_no_sequence() -> None:
    # trap 22
    batch = make_batch()
    slot_mapping, positions, token_ids, query_start, context_lens, rows = padded_arrays(batch, 8)
    for padded, own in zip((slot_mapping, positions, token_ids), input_arrays(batch)[:3], strict=True):
        assert padded[:4].tolist() == own.tolist()
    assert slot_mapping[4:].tolist() == [NOWHERE] * 4
    assert query_start.tolist() == [0, 1, 4, *[4] * 6]
    assert context_lens.tolist() == [1, 3, *[0] * 6]
    assert rows.tolist() == [*batch.slots.tolist(), *[0] * 6]
    assert positions[4:].tolist() == token_ids[4:].tolist() == [0] * 4


def test_a_step_of_padding_alone_has_the_shapes_of_any_other() -> None:
    for padded, own in zip(padded_arrays(None, 8), padded_arrays(make_batch(), 8), strict=True):
        assert (padded.shape, padded.dtype) == (own.shape, own.dtype)
    slot_mapping, *_, query_start, context_lens, _ = padded_arrays(None, 8)
    assert set(slot_mapping.tolist()) == {NOWHERE}
    assert not query_start.any()
    assert not context_lens.any()


def test_padding_to_the_size_itself_changes_nothing() -> None:
    batch = make_batch()
    for padded, own in zip(padded_arrays(batch, 4), input_arrays(batch), strict=True):
        assert padded[: len(own)].tolist() == own.tolist()
