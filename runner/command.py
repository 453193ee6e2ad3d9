"""What a command line asks for: list the jobs, print a configuration, or plan or run a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from runner.compose import compose_job, read_job
from runner.config import ConfigError
from runner.jobs import JobFile, find_job, list_jobs, take_job
from runner.messages import say
from runner.validation import validate

REFUSED = 2

_DESCRIPTION = """\
Run a batch inference job: read prompts from a table, write completions to another.

  job=NAME     a job file: its name in a jobs folder, or the path of a YAML file
  key=value    a key of the job to change, such as sampling.max_tokens=64 or sink.path=out
"""

_EXIT_CODES = """\
exit codes:
  0   complete without error rows; or planned (mode=plan)
  3   complete with error rows
  2   refused: configuration, fingerprint or an unreadable record
  4   the output is being written by another process
  74  storage failed; the same command goes on
  75  interrupted; the same command goes on
  1   anything else
"""


def run_command(argv: Sequence[str]) -> int:
    """Do what the command line asks for; the exit code. Raises what `runner.job.run` does, and ConfigError."""
    options = _parser().parse_intermixed_args(argv)
    config_dir: Path | None = options.config_dir
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError("--config-dir", str(config_dir), "a folder that exists")
    name, overrides = take_job(options.arguments)
    if name is None:
        say(f"which job? type job=NAME, or job=PATH of a YAML file\n\n{_jobs_text(config_dir)}")
        return REFUSED
    job = find_job(name, config_dir)
    composed = compose_job(job, overrides, config_dir)
    if options.cfg is not None:
        print(OmegaConf.to_yaml(composed), end="")
        return 0
    config = validate(composed)
    say(f"job {job.name} from {job.path}")

    # Here and not above: they import torch, and a wrong key is to be refused at once.
    if config.mode == "plan":
        from runner.job_plan import show_plan

        return show_plan(config)
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
    """The jobs that have a name, and how to run one of them: the demo, or the first that can be read."""
    jobs = list_jobs(config_dir)
    lines = ["jobs:", *(f"  {job.name:<16} {job.path}" for job in jobs)] if jobs else ["no job files found"]
    readable = filter(_is_readable, sorted(jobs, key=lambda job: job.name != "demo"))
    if (example := next(readable, None)) is not None:
        lines += ["", f"for example: python -m runner job={example.name}"]
    return "\n".join(lines)


def _is_readable(job: JobFile) -> bool:
    try:
        read_job(job.path)
    except ConfigError:
        return False
    return True
