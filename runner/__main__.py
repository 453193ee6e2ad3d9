"""The command line: `python -m runner job=NAME [key=value ...]`, also installed as `pagebatch`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from runner.compose import compose_job
from runner.config import ConfigError
from runner.environment import UnusableEnvironmentError, check_environment
from runner.interrupts import interruptible
from runner.jobs import find_job, list_jobs, take_job
from runner.validation import validate

FAILED = 1
REFUSED = 2
BUSY = 4
STORAGE_FAILED = 74
INTERRUPTED = 75

_DESCRIPTION = """\
Run a batch inference job: read prompts from a table, write completions to another.

  job=NAME     a job file: its name in a jobs folder, or the path of a YAML file
  key=value    a key of the job to change, such as sampling.max_tokens=64 or sink.path=out
"""

_EXIT_CODES = """\
exit codes:
  0   complete without error rows
  3   complete with error rows
  2   refused: configuration, fingerprint or an unreadable record
  4   the output is being written by another process
  74  storage failed; the same command goes on
  75  interrupted; the same command goes on
  1   anything else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default the process's own) and return the exit code."""
    try:
        check_environment()
        with interruptible():
            return _command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        return INTERRUPTED
    except Exception as error:
        code = _exit_code(error)
        if code == FAILED:
            traceback.print_exc()
        else:
            _say(str(error))
        return code


def _command(argv: Sequence[str]) -> int:
    """What the command line asks for."""
    options = _parser().parse_intermixed_args(argv)
    config_dir: Path | None = options.config_dir
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError("--config-dir", str(config_dir), "a folder that exists")
    name, overrides = take_job(options.arguments)
    if name is None:
        print(f"which job? type job=NAME, or job=PATH of a YAML file\n\n{_jobs_text(config_dir)}", file=sys.stderr)
        return REFUSED
    job = find_job(name, config_dir)
    composed = compose_job(job, overrides, config_dir)
    if options.cfg is not None:
        print(OmegaConf.to_yaml(composed), end="")
        return 0
    config = validate(composed)
    _say(f"job {job.name} from {job.path}")

    # Here and not above: it imports torch, and a wrong key is to be refused at once.
    from runner.job import run

    return run(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner",
        usage="%(prog)s job=NAME [key=value ...] [--config-dir DIR] [--cfg job]",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with further job files and presets")
    parser.add_argument("--cfg", choices=["job"], help="print every key of the job with its value, and do not run it")
    return parser


def _jobs_text(config_dir: Path | None) -> str:
    """The jobs that have a name, and how to run the first of them."""
    jobs = list_jobs(config_dir)
    lines = ["jobs:", *(f"  {job.name:<16} {job.path}" for job in jobs)]
    return "\n".join(
        [*lines, "", f"for example: python -m runner job={jobs[0].name}"] if jobs else ["no job files found"]
    )


def _exit_code(error: Exception) -> int:
    """The exit code of a failure that a user can do something about, `FAILED` for any other."""
    if isinstance(error, ConfigError | UnusableEnvironmentError):
        return REFUSED
    from engine.models.config import ModelError
    from runner.fingerprint import FingerprintError
    from runner.records import LedgerError
    from runner.shard_lock import ShardBusyError
    from runner.source_batch import SourceError
    from runner.storage import StorageError

    if isinstance(error, SourceError | ModelError | FingerprintError | LedgerError):
        return REFUSED
    if isinstance(error, ShardBusyError):
        return BUSY
    return STORAGE_FAILED if isinstance(error, StorageError) else FAILED


def _say(text: str) -> None:
    print(f"runner: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
