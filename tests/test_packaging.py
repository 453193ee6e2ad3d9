import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import import_utils

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy so that no build folder is left in it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("runner", "engine", "kernels", "conf", "jobs"):
        shutil.copytree(CHECKOUT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, tree / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = folder.glob("pagebatch-*.whl")
    return built


def test_the_wheel_holds_code_configuration_jobs_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("runner", "engine", "kernels", "conf", "jobs"):
        files = [
            path.relative_to(CHECKOUT).as_posix()
            for path in (CHECKOUT / folder).rglob("*")
            if path.suffix in (".py", ".yaml", ".parquet", ".jinja")
        ]
        assert files
        assert set(files) <= names
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)


def test_an_installed_wheel_finds_its_jobs_and_their_files_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    # A folder `jobs` of the user's own must not hide the packaged one.
    (here / "jobs").mkdir()
    (here / "jobs" / "mine.yaml").write_text("sink: {path: out}\n")

    def runner(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "runner", *arguments],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )

    listed = runner()
    assert listed.returncode == 2
    assert str(site / "jobs" / "demo.yaml") in listed.stderr
    assert str(here / "jobs" / "mine.yaml") in listed.stderr
    assert runner("job=demo", "--cfg", "job").returncode == 0
    # Every packaged path resolves: the job is refused for the column alone.
    refused = runner("job=demo", "sink.keep_columns=[message, message]")
    assert refused.returncode == 2
    assert "sink.keep_columns" in refused.stderr


def test_the_constraints_satisfy_the_declared_ranges() -> None:
    pinned = dict(
        re.fullmatch(r"(\S+)==(\S+)", line).groups()  # type: ignore[union-attr]
        for line in (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    pinned = {name.lower(): version for name, version in pinned.items()}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text


def test_our_version_is_none_that_transformers_would_take_for_hub_kernels() -> None:
    # transformers asks for the version of whichever distribution holds the import package `kernels`.
    own = Version(PROJECT["version"])
    assert not Version(import_utils.KERNELS_MIN_VERSION) <= own < Version(import_utils.KERNELS_MAX_VERSION)
