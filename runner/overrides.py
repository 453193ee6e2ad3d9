"""Command-line overrides, `key=value`, checked before Hydra composes them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from runner.config import SECTIONS, ConfigError, keys, unknown_key

# The keys in here are the chat template's, not ours.
_FREE = "prompt.chat_kwargs"


def prepare(arguments: Sequence[str]) -> list[str]:
    """The overrides to give to Hydra, one for each argument.

    A value for a text key is taken as it was typed where Hydra would read a number or a truth value
    (`1e3` stays `1e3`), and the keys of `prompt.chat_kwargs` need no `+`.

    Raises:
        ConfigError: an unknown key, or a value that Hydra cannot read or would read as something
            else (the message shows the quoted form to type).
    """
    parser = OverridesParser.create()
    return [_prepare(parser, each) for each in arguments]


def quoted(text: str) -> str:
    """`text` as Hydra's grammar quotes it."""
    parts: list[str] = []
    backslashes = 0
    for character in text:
        # A backslash stands for itself unless it comes before a quote.
        if character == '"':
            parts.append("\\" * (backslashes + 1))
        backslashes = backslashes + 1 if character == "\\" else 0
        parts.append(character)
    return '"' + "".join(parts) + "\\" * backslashes + '"'


def _prepare(parser: OverridesParser, argument: str) -> str:
    key, equals, value = argument.lstrip("+").partition("=")
    if not equals:
        raise ConfigError("command line", argument, "job=NAME and overrides such as sampling.max_tokens=64")
    if key not in keys() and key not in SECTIONS and not _is_free(key):
        raise unknown_key(key, value)
    try:
        override = parser.parse_override(f"{key}={value}")
    except HydraException as error:
        raise _needs_quotes(key, value) from error
    if override.is_sweep_override():  # Hydra reads `a,b` as two values to try one after the other.
        raise _needs_quotes(key, value)
    parsed = override.value()
    if key in SECTIONS and not isinstance(parsed, str):
        raise ConfigError(key, value, f"the name of a preset; single keys are set as {key}.KEY=…")
    if _type_of(key).startswith("str"):
        if isinstance(parsed, dict | list):
            raise _needs_quotes(key, value)
        if isinstance(parsed, bool) and "true" in keys()[key].metadata.get("choices", ()):
            value = str(parsed).lower()  # however it was capitalised, as in a job file
        if isinstance(parsed, bool | int | float):
            return f"{key}={quoted(value)}"
    _check_container(key, value, parsed)
    return f"++{key}={value}" if _is_free(key) else f"{key}={value}"


def _is_free(key: str) -> bool:
    return key == _FREE or key.startswith(f"{_FREE}.")


def _check_container(key: str, value: str, parsed: object) -> None:
    """Refuse a list for a mapping and the reverse, which Hydra cannot merge."""
    if _type_of(key).startswith("dict") and isinstance(parsed, list):
        raise ConfigError(key, value, f"a mapping, such as {key}={{name: value}}")
    if _type_of(key).startswith("list") and isinstance(parsed, dict):
        raise ConfigError(key, value, f"a list, such as {key}=[first,second]")


def _type_of(key: str) -> str:
    spec = keys().get(key)
    return "" if spec is None else str(spec.type)


def _needs_quotes(key: str, value: str) -> ConfigError:
    """The refusal of a value that Hydra does not read as a text, with the form that it does."""
    form = quoted(value)
    if _type_of(key).startswith("list"):
        form = f"[{','.join(quoted(each.strip()) for each in value.strip('[]').split(','))}]"
    return ConfigError(key, value, f"a text in quotes, for a shell: {shlex.quote(f'{key}={form}')}")
