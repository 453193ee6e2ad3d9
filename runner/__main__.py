"""The command line: `python -m runner job=NAME [key=value ...]`, also installed as `pagebatch`.

Imports nothing slow at the top, so that a signal finds its handler a moment after the start.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from runner.interrupts import interruptible
from runner.messages import drop_unwritten, open_streams, say

FAILED = 1
REFUSED = 2
BUSY = 4
STORAGE_FAILED = 74
INTERRUPTED = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default the process's own) and return the exit code."""
    open_streams()
    with interruptible() as signals:
        try:
            code = _run(sys.argv[1:] if argv is None else argv)
        except BaseException as error:
            signals.settled = True  # the first thing: a second signal must not break into what follows
            if isinstance(error, SystemExit) and not signals.came:
                raise
            code = _ended_by(error, interrupted=signals.came)
        signals.settled = True
    drop_unwritten()
    return code


def _run(argv: Sequence[str]) -> int:
    # Threads of torch that wait for each other spin, unless told before it is imported. Where another process
    # needs a core meanwhile, that made jobs on a CPU several times slower; alone they lose nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from runner.command import run_command
    from runner.environment import check_environment

    check_environment()
    return run_command(argv)


def _ended_by(error: BaseException, *, interrupted: bool) -> int:
    """Say what ended the command and give its exit code.

    After a signal any error is taken for its doing, as the code it hit may have turned the interruption
    into an error of its own; but failing storage is told.
    """
    code = _exit_code(error, interrupted=interrupted)
    notes = getattr(error, "__notes__", [])
    if code == INTERRUPTED:
        say("; ".join(["interrupted", *(notes or ["the same command goes on from here"])]))
    elif code == FAILED:
        say(f"failed\n{''.join(traceback.format_exception(error))}")
    else:
        say("\n".join([str(error), *notes]))
    return code


def _exit_code(error: BaseException, *, interrupted: bool = False) -> int:
    """The exit code of a failure that a user can do something about, `FAILED` for any other."""
    from runner.storage import StorageError

    if isinstance(error, StorageError):
        return STORAGE_FAILED
    if interrupted or isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    from runner.config import ConfigError
    from runner.environment import UnusableEnvironmentError

    if isinstance(error, ConfigError | UnusableEnvironmentError):
        return REFUSED
    from engine.models.config import ModelError
    from runner.fingerprint import FingerprintError
    from runner.records import LedgerError
    from runner.shard_lock import ShardBusyError
    from runner.source_batch import SourceError

    if isinstance(error, SourceError | ModelError | FingerprintError | LedgerError):
        return REFUSED
    return BUSY if isinstance(error, ShardBusyError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
