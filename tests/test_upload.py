"""Arrays on their way to the device: laid out without overlap, and back as they were."""

from __future__ import annotations

import numpy as np
import torch

from engine.upload import ALIGNMENT, Upload, lay_out

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.empty((3, 0), np.int32),
    np.linspace(0, 1, 7, dtype=np.float32),
    np.arange(6, dtype=np.int32).reshape(3, 2),
]


def test_fields_are_aligned_and_do_not_overlap() -> None:
    fields, length = lay_out(ARRAYS)
    ends = [field.offset + field.length for field in fields]
    assert [field.length for field in fields] == [array.nbytes for array in ARRAYS]
    assert all(field.offset % ALIGNMENT == 0 for field in fields)
    assert all(field.offset >= end for field, end in zip(fields[1:], ends[:-1], strict=True))
    assert length >= ends[-1]


def test_what_is_written_on_the_host_is_read_at_the_same_place_of_the_device() -> None:
    fields, length = lay_out(ARRAYS)
    buffer = torch.zeros(length, dtype=torch.uint8)
    for field, array in zip(fields, ARRAYS, strict=True):
        field.on_host(buffer.numpy())[...] = array
    for field, array in zip(fields, ARRAYS, strict=True):
        assert np.array_equal(field.on_device(buffer).numpy(), array)
        assert field.on_device(buffer).numpy().dtype == array.dtype


def test_what_is_sent_arrives() -> None:
    sent = Upload(torch.device("cpu")).send(ARRAYS)
    for tensor, array in zip(sent, ARRAYS, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
