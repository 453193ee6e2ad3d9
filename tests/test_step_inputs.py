"""The arrays of a step, as they are and padded to a captured size."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from engine.batch import Batch, build_batch
from engine.noise_keys import position_keys
from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable
from engine.step_inputs import NOWHERE, StepInputs, StepShape, exact_shape
from engine.upload import Array

TABLES = (5, 8)  # four slots and the spare one


def make_batch() -> Batch:
    """A decode and the last chunk of a prompt."""
    table = SequenceTable(4, block_size=4)
    for row, (length, computed) in enumerate(((6, 5), (7, 4))):
        request = Request(row, np.arange(10 * row, 10 * row + length, dtype=np.int32), Sampling(temperature=0.5 + row))
        table.admit(Sequence(request), np.array([2 * row, 2 * row + 1], np.int32), computed, 30)
    return build_batch(table, table.running, np.array([1, 3]))


def filled(shape: StepShape, batch: Batch | None) -> dict[str, Array]:
    arrays = shape.empty()
    for array in arrays:
        array.fill(77)
    shape.fill(arrays, batch)
    return {field.name: array for field, array in zip(fields(StepInputs), arrays, strict=True)}


def test_a_step_without_padding_holds_the_batch() -> None:
    batch = make_batch()
    arrays = filled(exact_shape(batch, TABLES), batch)
    assert arrays["token_ids"].tolist() == batch.token_ids.tolist()
    assert arrays["slot_mapping"].tolist() == batch.slot_mapping.tolist()
    assert arrays["query_start"].tolist() == [0, 1, 4]
    assert arrays["table_rows"].tolist() == arrays["sampled_slots"].tolist() == batch.slots.tolist()
    slots, places, blocks = batch.block_changes
    assert arrays["changed_places"].tolist() == [8 * slot + place for slot, place in zip(slots, places, strict=True)]
    assert arrays["changed_blocks"].tolist() == blocks.tolist()
    assert arrays["temperature"].tolist() == [0.5, 1.5]
    assert np.array_equal(arrays["keys"], position_keys(batch.sampling.row_key, batch.sampling.position))


def test_padding_writes_nowhere_belongs_to_no_sequence_and_draws_for_no_slot() -> None:
    # trap 22
    batch = make_batch()
    arrays = filled(StepShape(tokens=8, sequences=6, changes=16, pairs=3, tables=TABLES), batch)
    assert arrays["slot_mapping"].tolist() == [*batch.slot_mapping.tolist(), *[NOWHERE] * 4]
    assert arrays["query_start"].tolist() == [0, 1, 4, 4, 4, 4, 4]
    assert arrays["context_lens"].tolist() == [*batch.context_lens.tolist(), 0, 0, 0, 0]
    changes = batch.block_changes.shape[1]
    assert set(arrays["changed_places"][changes:].tolist()) == {4 * 8}, "the row after the last slot"
    assert set(arrays["sampled_slots"][2:].tolist()) == {4}
    assert set(arrays["suppressed"].ravel().tolist()) == {-1}
    for name in ("positions", "token_ids"):
        assert set(arrays[name][4:].tolist()) == {0}


def test_nothing_of_the_step_before_is_left_in_the_padding() -> None:
    # trap 22
    shape = StepShape(tokens=8, sequences=6, changes=16, pairs=3, tables=TABLES)
    for batch in (make_batch(), None):
        fresh = filled(shape, batch)
        arrays = shape.empty()
        shape.fill(arrays, make_batch())
        shape.fill(arrays, batch)
        assert all(np.array_equal(one, other) for one, other in zip(arrays, fresh.values(), strict=True))


def test_suppressed_pairs_beyond_the_room_are_left_to_the_caller() -> None:
    batch = make_batch()
    pairs = np.array([[0, 3], [1, 3]], np.int32)
    batch = replace(batch, sampling=replace(batch.sampling, suppressed=pairs))
    shape = StepShape(tokens=4, sequences=2, changes=4, pairs=0, tables=TABLES)
    assert filled(shape, batch)["suppressed"].shape == (0, 2)
    assert filled(exact_shape(batch, TABLES), batch)["suppressed"].tolist() == pairs.tolist()
