"""Whether the installed packages can work beside ours."""

from __future__ import annotations

from importlib import metadata


class UnusableEnvironmentError(Exception):
    """The installed packages clash with ours: exit code 2. The text says what to do."""


def check_environment() -> None:
    """Refuse an environment that holds the PyPI package `kernels`.

    Its import name is that of our own package. transformers takes its metadata for a promise that
    `from kernels import …` finds its functions and, where ours comes first, fails on import; where
    theirs comes first, ours does not exist. Called before anything imports transformers.

    Raises:
        UnusableEnvironmentError: the package is installed.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise UnusableEnvironmentError(
        f"the PyPI package 'kernels' {version} is installed here. pagebatch has a package of the same import name, "
        "and transformers would mistake one for the other. Use an environment without it, or run: "
        "pip uninstall kernels && pip install --force-reinstall --no-deps pagebatch"
    )
