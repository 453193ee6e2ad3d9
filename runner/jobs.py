"""Finding job files: `job=NAME` names a file in a jobs folder, or is the path of a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config import ConfigError

# Next to this package, in a checkout as in a wheel; not looked up by import, since a folder `jobs` of
# the user's may come first on the import path.
PACKAGED = Path(__file__).resolve().parents[1] / "jobs"

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class JobFile:
    """A job file and the name it is called by."""

    name: str
    path: Path


def take_job(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `job=`, None where there is none, and the other arguments.

    Raises:
        ConfigError: more than one `job=`, or an empty one.
    """
    jobs = [each.removeprefix("job=") for each in arguments if each.startswith("job=")]
    if len(jobs) > 1 or "" in jobs:
        raise ConfigError("job", " and ".join(jobs), "one name or path")
    return (jobs[0] if jobs else None), [each for each in arguments if not each.startswith("job=")]


def list_jobs(config_dir: Path | None) -> list[JobFile]:
    """The jobs that have a name: of two with the same name, the one that `find_job` gives."""
    found: dict[str, JobFile] = {}
    for folder in _folders(config_dir):
        for path in sorted(each for each in folder.glob("*") if each.suffix in _SUFFIXES and each.is_file()):
            found.setdefault(path.stem, JobFile(path.stem, path))
    return sorted(found.values(), key=lambda job: job.name)


def find_job(name: str, config_dir: Path | None) -> JobFile:
    """The job file that `name` means: a path where it looks like one, else the first folder's.

    Raises:
        ConfigError: there is no such job.
    """
    path = Path(name).expanduser()
    is_path = path.suffix in _SUFFIXES or len(path.parts) > 1
    if is_path and path.is_file():
        return JobFile(path.stem, path)
    jobs = {job.name: job for job in list_jobs(config_dir)}
    if is_path:
        hint = f"job={path.stem} perhaps, which is {jobs[path.stem].path}; " if path.stem in jobs else ""
        accepted = f"{hint}the path of a YAML file that exists, or the name of a job: {', '.join(jobs)}"
        raise ConfigError("job", name, accepted)
    if name in jobs:
        return jobs[name]
    near = difflib.get_close_matches(name, jobs, n=1)
    hint = f"{near[0]} perhaps; " if near else ""
    folders = ", ".join(str(folder) for folder in _folders(config_dir))
    raise ConfigError(
        "job", name, f"{hint}one of {', '.join(jobs) or 'no jobs'} (looked in {folders}), or the path of a YAML file"
    )


def _folders(config_dir: Path | None) -> list[Path]:
    """Where jobs are looked for, the first first: `--config-dir`, the current folder's, the packaged ones."""
    given = [config_dir, config_dir / "jobs"] if config_dir is not None else []
    return list(dict.fromkeys(folder.resolve() for folder in (*given, Path.cwd() / "jobs", PACKAGED)))
