"""Signals that end a job: at once while nothing is at stake, between two steps while rows are running."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The job was told to end: exit code 75, and the same command goes on."""


class SignalRecord:
    """That a signal came, kept whatever became of the exception it raised.

    A handler raises inside whatever code happens to run, and some code replaces the exception by one of
    its own or swallows it.

    Attributes:
        came: whether any signal came.
        settled: once set, further signals are recorded and raise nothing.
    """

    def __init__(self) -> None:
        self.came = False
        self.settled = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal and end the work where it is."""
        self.came = True
        if not self.settled:
            raise Interrupted


class StopRequest:
    """Whether a signal has asked the job to stop; true once one came."""

    def __init__(self, record: SignalRecord) -> None:
        self._record = record
        self._asked = record.came

    def __bool__(self) -> bool:
        return self._asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one ends the job where it is."""
        self._record.came = True
        if self._asked:
            raise Interrupted
        self._asked = True


# Signals are the process's, so their record is too; None outside `interruptible`.
_record: SignalRecord | None = None


@contextmanager
def interruptible() -> Iterator[SignalRecord]:
    """Make SIGINT and SIGTERM raise Interrupted, and keep a record of them."""
    global _record
    _record = record = SignalRecord()
    try:
        with _handling(record.handle):
            yield record
    finally:
        _record = None


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Make the first SIGINT or SIGTERM a request that the caller looks at when it can stop cleanly.

    A signal that came before, inside `interruptible`, and got lost is such a request already.
    """
    request = StopRequest(_record or SignalRecord())
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
