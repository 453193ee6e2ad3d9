"""Composing a job with Hydra: defaults, then the job file, then presets and keys of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import SECTIONS, ConfigError
from runner.jobs import JobFile
from runner.overrides import prepare, quoted

# Next to this package, in a checkout as in a wheel; see `runner.jobs.PACKAGED`.
_CONF = Path(__file__).resolve().parents[1] / "conf"


def compose_job(job: JobFile, arguments: Sequence[str], config_dir: Path | None) -> DictConfig:
    """The configuration of a job, not yet validated.

    `arguments` are command-line overrides. `config_dir` is a folder with further presets, such as
    `sampling/mine.yaml` for `sampling=mine`. What a preset of the command line sets wins over the job file; what
    it only takes over from the section's defaults does not. A preset that the job file chooses yields to its keys.

    Raises:
        ConfigError: a job file that cannot be read, an override that is refused, a preset that does
            not exist.
    """
    overrides = prepare(arguments)
    chosen = dict(each.split("=", 1) for each in overrides if each.split("=", 1)[0] in SECTIONS)
    folders = [_CONF, *([config_dir] if config_dir is not None else [])]
    presets = OmegaConf.create({key: _preset_keys(key, name.strip("'\""), folders) for key, name in chosen.items()})
    # Configs of groups of their own, put at the top level: they need no header of their author.
    for group, node in (("job", read_job(job.path)), ("presets", presets)):
        ConfigStore.instance().store(group=group, name="file", node=node, package="_global_")
        overrides.append(f"+{group}=file")
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]")
    with initialize_config_dir(str(_CONF), job_name=job.name, version_base="1.3"):
        try:
            return compose("config", overrides)
        except MissingConfigException as error:
            missing = str(error.missing_cfg_file)
            raise ConfigError("preset", missing, f"one of {', '.join(error.options or ['none'])}") from error
        except HydraException as error:
            raise ConfigError("job", str(job.path), f"a configuration that Hydra can compose: {error}") from error


def read_job(path: Path) -> DictConfig:
    """The keys of a job file.

    Raises:
        ConfigError: it cannot be read, is no mapping, or chooses a preset in a way that Hydra does not take.
    """
    content = _read(path)
    plain: Any = OmegaConf.to_container(content)
    for section in SECTIONS:
        if isinstance(name := plain.get(section), str) and "${" not in name:
            raise ConfigError(section, name, f"a mapping of keys; {_how_to_choose(section, name)}")
    defaults = plain.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError("defaults", defaults, "a list such as [override /sampling: creative]")
    for each in defaults:
        for key, name in each.items() if isinstance(each, dict) else ():
            section = str(key).rpartition(" ")[2].lstrip("/")
            if section in SECTIONS and key != f"override /{section}":
                raise ConfigError("defaults", f"{key}: {name}", _how_to_choose(section, name))
    return content


def _how_to_choose(section: str, name: str) -> str:
    return (
        f"a preset is chosen by {section}={name} on the command line, "
        f"or in the job file by `defaults: [override /{section}: {name}]`"
    )


def _preset_keys(section: str, name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """What a preset sets beyond the section's defaults, itself or by another preset that it names."""
    path = next((path for folder in folders if (path := folder / section / f"{name}.yaml").is_file()), None)
    if name == "default" or path is None:  # one that does not exist is refused by Hydra, with those that do
        return {}
    content: Any = OmegaConf.to_container(_read(path))
    bases = [str(base) for base in content.pop("defaults", ())]
    keys: dict[str, Any] = {}
    for base in bases if "_self_" in bases else [*bases, "_self_"]:
        keys |= content if base == "_self_" else _preset_keys(section, base, folders)
    return keys


def _read(path: Path) -> DictConfig:
    """A YAML file of keys."""
    try:
        content = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("job", str(path), f"a readable YAML file: {reason}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError("job", str(path), "a YAML file of keys such as source, prompt, model and sink")
    return content
