"""Signals that end a job: at once while nothing is at stake, between two steps while rows are running."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The job was told to end: exit code 75, and the same command goes on."""


class StopRequest:
    """Whether a signal has asked the job to stop; true once one came."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one ends the job where it is."""
        if self._asked:
            raise Interrupted
        self._asked = True


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise Interrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    with _handling(interrupt):
        yield


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Make the first SIGINT or SIGTERM a request that the caller looks at when it can stop cleanly."""
    request = StopRequest()
    with _handling(request.handle):
        yield request


@contextmanager
def _handling(handler: object) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
