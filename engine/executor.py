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


class Executor(Protocol):
    """Computes a batch: writes its K/V and draws the sampled tokens."""

    def execute(self, batch: Batch) -> Drawn: ...

    def memory(self) -> tuple[int, int]:
        """Bytes the device allocator has given out and reserved; zeros on a CPU."""
        ...
