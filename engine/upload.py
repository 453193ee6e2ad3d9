"""Bringing a step's arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]
ALIGNMENT = 16
_STAGES = 2
_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """Where one array lies in a buffer of bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """The array as a view of `buffer`, uint8 [bytes]."""
        length = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return buffer[self.offset : self.offset + length].view(self.dtype).view(self.shape)


def lay_out(arrays: Sequence[Array]) -> tuple[list[Field], int]:
    """A place for each array, one after the other, and the bytes they take together."""
    fields, end = [], 0
    for array in arrays:
        fields.append(Field(end, array.shape, _TORCH_DTYPES[array.dtype.name]))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return fields, end


class Upload:
    """Copies arrays of int32, int64 or float32 to a device.

    On a GPU they go through page-locked memory without waiting for the device. That memory is used again
    two calls later: by then the step of the call must be over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = [torch.empty(0, dtype=torch.uint8)] * _STAGES
        self._calls = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        fields, length = lay_out(arrays)
        buffer = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._copy(arrays, fields, length, buffer)
        return [field.of(buffer) for field in fields]

    def send_into(self, buffer: Tensor, arrays: Sequence[Array]) -> None:
        """Write the arrays into `buffer`, uint8 on a GPU, as `lay_out` places them."""
        fields, length = lay_out(arrays)
        self._copy(arrays, fields, length, buffer[:length])

    def _copy(self, arrays: Sequence[Array], fields: Sequence[Field], length: int, buffer: Tensor) -> None:
        stage = self._stage(length)
        host = stage.numpy()
        for array, field in zip(arrays, fields, strict=True):
            place = host[field.offset : field.offset + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        buffer.copy_(stage, non_blocking=True)

    def _stage(self, length: int) -> Tensor:
        turn = self._calls % _STAGES
        self._calls += 1
        if len(self._staging[turn]) < length:
            self._staging[turn] = torch.empty(2 * length, dtype=torch.uint8, pin_memory=True)
        return self._staging[turn][:length]
