import dataclasses
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import conf
from runner.config import ConfigError, EngineSection, OrderConfig, RunConfig, SinkConfig, keys, unknown_key
from runner.units import CommitEvery

CONF = Path(inspect.getfile(conf)).parent


def test_the_documented_defaults_are_those_of_the_schema() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        documented = compose("config")
    assert _leaves(OmegaConf.merge(OmegaConf.structured(RunConfig), {})) == {
        key: str(value) if keys()[key].type == "str" and value is not None else value
        for key, value in _leaves(documented).items()
    }


def test_every_key_has_a_comment() -> None:
    for file in [CONF / "config.yaml", *CONF.glob("*/default.yaml")]:
        lines = file.read_text(encoding="utf-8").splitlines()
        for before, line in itertools.pairwise(lines):
            if line and not line.startswith(("#", " ", "defaults")):
                assert before.startswith("#"), f"{file.name}: {line}"


def test_a_preset_holds_known_keys_only() -> None:
    for file in CONF.glob("*/*.yaml"):
        names = {f"{file.parent.name}.{name}" for name in OmegaConf.load(file)} - {f"{file.parent.name}.defaults"}
        assert names <= keys().keys(), file


def test_an_error_gives_key_value_and_what_is_accepted() -> None:
    error = ConfigError("sampling.top_p", 2.0, "a number above 0, up to 1")
    assert str(error) == "sampling.top_p: 2.0; accepted: a number above 0, up to 1"
    assert str(ConfigError("sink.path", None, "a path")) == "sink.path: not set; accepted: a path"


def test_an_unknown_key_is_answered_with_the_nearest_and_all_of_its_section() -> None:
    error = unknown_key("engine.blocksize", 32)
    assert error.accepted.startswith("engine.block_size perhaps; the keys are engine.device, engine.block_size")
    assert "sampling, order, sink" in unknown_key("sinks", 1).accepted


def test_sizes_and_intervals_are_given_parsed() -> None:
    assert EngineSection().kv_memory_bytes is None
    assert EngineSection(kv_memory="1MiB").kv_memory_bytes == 2**20
    assert OrderConfig().window_bytes == 2**31
    assert SinkConfig().commit_interval == CommitEvery(seconds=60.0)
    assert SinkConfig(commit_every="500").commit_interval == CommitEvery(rows=500)


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().mode = "other"  # type: ignore[misc]


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, runner.validation, runner.compose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _leaves(config: object) -> dict[str, object]:
    plain = OmegaConf.to_container(config)  # type: ignore[arg-type]
    assert isinstance(plain, dict)
    leaves: dict[str, object] = {}
    for key, value in plain.items():
        if f"{key}" in keys():
            leaves[str(key)] = value
        else:
            leaves |= {f"{key}.{name}": inner for name, inner in value.items()}
    return leaves
