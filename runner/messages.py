"""What the runner says on standard error. A stream that is closed, full or broken must not cost a job."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Tell the user something; lost if it cannot be written."""
    with contextlib.suppress(OSError):
        print(f"runner: {text}", file=sys.stderr, flush=True)


def open_streams() -> None:
    """Give standard streams that are closed the null device.

    Else the next file to be opened, one of the output perhaps, gets the number of standard error, and
    what some library prints goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open for as long as the process lives)


def drop_unwritten() -> None:
    """Forget messages that could not be written: on them Python would end with an exit code of its own."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open for as long as the process lives)
