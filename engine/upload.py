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
"""Bytes: Triton compiles a kernel for pointers of this alignment, and once more for others."""
STAGES = 2
"""Page-locked copies of a buffer: a step fills one while the step before it may still be read from the other."""
_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """Where one array lies in a buffer of bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def length(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def on_device(self, buffer: Tensor) -> Tensor:
        """The array as a view of `buffer`, uint8 [bytes]."""
        return buffer[self.offset : self.offset + self.length].view(_TORCH_DTYPES[self.dtype]).view(self.shape)

    def on_host(self, buffer: Array) -> Array:
        """The array as a view of `buffer`, uint8 [bytes]."""
        return buffer[self.offset : self.offset + self.length].view(self.dtype).reshape(self.shape)


def lay_out(arrays: Sequence[Array]) -> tuple[list[Field], int]:
    """A place for each array, one after the other, and the bytes they take together."""
    fields, end = [], 0
    for array in arrays:
        fields.append(Field(end, array.shape, array.dtype))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return fields, end


class Upload:
    """Sends arrays of int32, int64 or float32 to a device, of other sizes each time.

    On a GPU they go through page-locked memory without waiting for the device. That memory is used again
    two calls later: by then the step of the call must be over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = [torch.empty(0, dtype=torch.uint8)] * STAGES
        self._calls = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        fields, length = lay_out(arrays)
        stage = self._stage(length)
        for field, array in zip(fields, arrays, strict=True):
            field.on_host(stage.numpy())[...] = array
        buffer = stage.to(self._device, non_blocking=True)
        return [field.on_device(buffer) for field in fields]

    def _stage(self, length: int) -> Tensor:
        turn = self._calls % STAGES
        self._calls += 1
        if len(self._staging[turn]) < length:
            self._staging[turn] = torch.empty(2 * length, dtype=torch.uint8, pin_memory=True)
        return self._staging[turn][:length]
