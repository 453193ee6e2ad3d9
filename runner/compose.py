"""Composing a job with Hydra: defaults, then presets, then the job file, then the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import ConfigError
from runner.jobs import JobFile
from runner.overrides import prepare, quoted

# Next to this package, in a checkout as in a wheel; see `runner.jobs.PACKAGED`.
_CONF = Path(__file__).resolve().parents[1] / "conf"


def compose_job(job: JobFile, arguments: Sequence[str], config_dir: Path | None) -> DictConfig:
    """The configuration of a job, not yet validated.

    `arguments` are command-line overrides. `config_dir` is a folder with further presets, such as
    `sampling/mine.yaml` for `sampling=mine`.

    Raises:
        ConfigError: a job file that cannot be read, an override that is refused, a preset that does
            not exist.
    """
    overrides = prepare(arguments)
    # The job is a config of its own group, put at the top level: it needs no header of its author.
    ConfigStore.instance().store(group="job", name="file", node=_read(job.path), package="_global_")
    overrides.append("+job=file")
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]")
    with initialize_config_dir(str(_CONF), job_name=job.name, version_base="1.3"):
        try:
            return compose("config", overrides)
        except MissingConfigException as error:
            missing = str(error.missing_cfg_file)
            raise ConfigError("preset", missing, f"one of {', '.join(error.options or ())}") from error
        except HydraException as error:
            raise ConfigError("job", str(job.path), f"a configuration that Hydra can compose: {error}") from error


def _read(path: Path) -> DictConfig:
    """The keys of a job file."""
    try:
        content = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("job", str(path), f"a readable YAML file: {reason}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError("job", str(path), "a YAML file of keys such as source, prompt, model and sink")
    return content
