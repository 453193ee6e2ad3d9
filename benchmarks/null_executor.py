"""An executor without a model, so that only what the engine decides is left to measure."""

from __future__ import annotations

import numpy as np

from engine.batch import Batch
from engine.executor import Drawn

TOKEN = 1
"""What it draws every time. As no end or stop token is asked for, sequences end by their length."""


class NullStep:
    """A step that was over when it was launched."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def wait(self) -> Drawn:
        return Drawn(np.full(self._rows, TOKEN, np.int32), np.zeros(self._rows, np.bool_))


class NullExecutor:
    """Computes nothing and keeps nothing: every sampled row draws `TOKEN`, at once."""

    def launch(self, batch: Batch) -> NullStep:
        return NullStep(len(batch.sampled_tokens))

    def memory(self) -> tuple[int, int]:
        return 0, 0
