"""What the engine asks of whatever computes its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step sampled: `token_ids` int32 [rows]; `failed` bool [rows], rows whose logits were not finite."""

    token_ids: npt.NDArray[np.int32]
    failed: npt.NDArray[np.bool_]


class DeviceOutOfMemoryError(RuntimeError):
    """The device had no memory left for a step, which did not happen."""


class LaunchedStep(Protocol):
    """A batch that is being computed."""

    def wait(self) -> Drawn:
        """Its draws, as soon as they are there."""
        ...


class Executor(Protocol):
    """Computes batches in the order they are launched: writes their K/V and draws the sampled tokens.

    It keeps the block tables, which a batch only changes, and the token that each slot drew last.
    """

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a batch. At most one other may be launched and not waited for. Raises DeviceOutOfMemoryError."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes the device allocator has given out and reserved; zeros on a CPU."""
        ...
