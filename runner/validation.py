"""From what Hydra composed to a typed configuration, or a refusal that names key, value and what is accepted.

Nothing here needs torch or a GPU, so a wrong key is refused at once.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from runner.config import SECTIONS, ConfigError, RunConfig, keys, unknown_key
from runner.paths import UnresolvedPathError, resolve_path
from runner.units import COMMIT_WORDS, SIZE_WORDS, parse_commit_every, parse_size


def validate(composed: DictConfig | Mapping[str, Any]) -> RunConfig:
    """The typed configuration, with `~` and `package://` in its paths resolved.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, an interpolation that does not
            resolve, or a combination that cannot run.
    """
    config = _typed(_plain(composed))
    for key, value in _values(config):
        _check_value(key, value)
    _check_combinations(config)
    config = _resolve_paths(config)
    _check_template_file(config.prompt.template_file)
    _check_folder(config.sink.path)
    return config


def _plain(composed: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Plain containers: interpolations resolved, a single `sampling.stop` a list, `engine.cuda_graphs` text."""
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.create(dict(composed)), resolve=True)
    except OmegaConfBaseException as error:
        accepted = "a ${key} that names another key; text that holds ${ itself goes into prompt.template_file"
        raise ConfigError(error.full_key or "configuration", str(error).splitlines()[0], accepted) from error
    sampling = plain.get("sampling")
    if isinstance(sampling, dict) and isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    engine = plain.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("cuda_graphs"), bool):
        engine["cuda_graphs"] = str(engine["cuda_graphs"]).lower()
    return plain


def _typed(plain: dict[str, Any]) -> RunConfig:
    """`plain` merged into the schema: OmegaConf refuses unknown keys and wrong types."""
    for section, kind in SECTIONS.items():
        if not isinstance(plain.get(section, {}), dict):
            names = ", ".join(f"{section}.{each.name}" for each in dataclasses.fields(kind))
            raise ConfigError(section, plain[section], f"a section with the keys {names}")
    for key, spec in keys().items():
        section, _, name = key.rpartition(".")
        value = (plain.get(section, {}) if section else plain).get(name)
        if not _fits(str(spec.type), value):
            raise ConfigError(key, value, _type_words(key))
    try:
        merged = OmegaConf.merge(_schema(), plain)
    except ConfigKeyError as error:
        key = str(error.full_key)
        raise unknown_key(key, OmegaConf.select(OmegaConf.create(plain), key)) from error
    except OmegaConfBaseException as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key))
        raise ConfigError(key, OmegaConf.select(OmegaConf.create(plain), key), _type_words(key)) from error
    for key in sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(key, None, f"a path, for example {key}=…")
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    return config


def _fits(kind: str, value: Any) -> bool:
    """Whether OmegaConf may see a value of a field: some that do not fit it takes, changed or not."""
    if kind.startswith("bool"):
        return isinstance(value, bool | None)
    if kind.startswith("list") and isinstance(value, list):
        item = str if kind == "list[str]" else int
        return all(isinstance(each, item) and not isinstance(each, bool) for each in value)
    if kind.startswith("dict") and isinstance(value, dict):
        return _is_json(value)
    return True


def _is_json(value: Any) -> bool:
    """Whether a value is made of what JSON has, with texts as keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, str | int | float | None)


def _schema() -> DictConfig:
    """The dataclasses as a structured config that job files and overrides can be merged into."""
    config = OmegaConf.structured(RunConfig)
    # Frozen dataclasses make read-only nodes, which would refuse the merge too.
    for node in (config, *(config[section] for section in SECTIONS)):
        OmegaConf.set_readonly(node, None)
    return config


_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list of texts, numbers among them in quotes",
    "list[int]": "a list of whole numbers",
    "dict[str, Any]": "a mapping from names to values",
}


def _type_words(key: str) -> str:
    """What the type of a key accepts, in words."""
    spec = keys().get(key)
    if spec is None:
        return "text, numbers, true, false, lists and mappings"
    if choices := spec.metadata.get("choices"):
        return ", ".join(choices)
    kind = str(spec.type)
    words = _TYPE_WORDS[kind.removesuffix(" | None")]
    return f"{words}, or null" if kind.endswith("| None") else words


def _values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value; unset ones are left out."""
    for key in keys():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if value is not None:
            yield key, value


class _Rule(NamedTuple):
    holds: Callable[[Any], bool]
    accepted: str


def _at_least(minimum: int) -> _Rule:
    return _Rule(lambda value: value >= minimum, f"a whole number, {minimum} or more")


def _between(minimum: int, maximum: int, reason: str) -> _Rule:
    accepted = f"a whole number from {minimum} to {maximum:,} ({reason})"
    return _Rule(lambda value: minimum <= value <= maximum, accepted)


def _parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return holds


_INT64 = 2**63
_MAX_INT32 = 2**31 - 1
# Far more than any device gains from; each row and token of a step costs memory beside the pool.
_MAX_SEQS, _MAX_BATCH_TOKENS = 65_536, 1_048_576
# Logits are divided by the temperature in float32, where others overflow.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
_NOT_EMPTY = _Rule(lambda text: text != "", "text that is not empty")
_COLUMNS = _Rule(lambda names: "" not in names and len({*names}) == len(names), "column names, each once")
_RULES = {
    "source.path": _NOT_EMPTY,
    "source.split": _NOT_EMPTY,
    "source.id_column": _NOT_EMPTY,
    "source.limit": _at_least(0),
    "source.skip": _at_least(0),
    "prompt.column": _NOT_EMPTY,
    "prompt.template": _NOT_EMPTY,
    "prompt.template_file": _NOT_EMPTY,
    "prompt.messages_column": _NOT_EMPTY,
    "prompt.token_ids_column": _NOT_EMPTY,
    "model.path": _NOT_EMPTY,
    "model.tokenizer": _NOT_EMPTY,
    "engine.device": _Rule(
        lambda text: re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", text) is not None,
        "auto, cpu, cuda, cuda:N with a device number N below 100",
    ),
    "engine.block_size": _Rule(lambda size: size in (16, 32, 64, 128, 256), "16, 32, 64, 128, 256"),
    "engine.kv_memory": _Rule(lambda text: text == "auto" or _parses(parse_size)(text), f"auto, {SIZE_WORDS}"),
    "engine.max_seqs": _between(1, _MAX_SEQS, "each takes memory beside the pool"),
    "engine.max_batch_tokens": _between(1, _MAX_BATCH_TOKENS, "each takes memory beside the pool"),
    "engine.max_model_len": _between(2, _MAX_INT32, "positions have 32 bits"),
    "sampling.temperature": _Rule(
        lambda value: value == 0 or _MIN_TEMPERATURE <= value <= _MAX_TEMPERATURE,
        f"0 (greedy), or a number from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE:,.0f}",
    ),
    "sampling.top_p": _Rule(lambda value: 0 < value <= 1, "a number above 0, up to 1 (no filter)"),
    "sampling.top_k": _between(0, _MAX_INT32, "0 is no filter"),
    "sampling.min_p": _Rule(lambda value: 0 <= value <= 1, "a number from 0 (no filter) to 1"),
    "sampling.max_tokens": _at_least(1),
    "sampling.min_tokens": _at_least(0),
    "sampling.stop": _Rule(lambda texts: "" not in texts, "texts that are not empty"),
    "sampling.n": _between(1, _MAX_SEQS, "the samples of a row run side by side: engine.max_seqs at most"),
    "sampling.stop_token_ids": _Rule(lambda ids: all(0 <= each < 2**31 for each in ids), "token ids, 0 or more"),
    "order.window": _Rule(_parses(parse_size), SIZE_WORDS),
    "sink.path": _Rule(
        lambda text: text != "" and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is None,
        "a local folder; copy the output elsewhere when the job is complete",
    ),
    "sink.rows_per_part": _at_least(1),
    "sink.commit_every": _Rule(_parses(parse_commit_every), COMMIT_WORDS),
    "sink.keep_columns": _COLUMNS,
}


def _check_value(key: str, value: Any) -> None:
    """Refuse a value outside its choices or range."""
    choices = keys()[key].metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(key, value, ", ".join(choices))
    if not _finite(value):
        raise ConfigError(key, value, "a finite number")
    if not _storable(value):
        raise ConfigError(key, value, "text that UTF-8 can hold (no lone surrogates)")
    if key in _PATHS and "\0" in value:
        raise ConfigError(key, value, "a path (no NUL characters)")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise ConfigError(key, value, "a whole number of 64 bits")
    rule = _RULES.get(key)
    if rule is not None and not rule.holds(value):
        raise ConfigError(key, value, rule.accepted)


def _finite(value: Any) -> bool:
    """Whether no number in a value, however nested, is NaN or infinite."""
    if isinstance(value, dict):
        return all(_finite(each) for each in value.values())
    if isinstance(value, list):
        return all(_finite(each) for each in value)
    return not isinstance(value, float) or math.isfinite(value)


def _storable(value: Any) -> bool:
    """Whether every text in a value, however nested, has a UTF-8 form: it goes to files and to the tokenizer."""
    if isinstance(value, dict):
        return all(_storable(key) and _storable(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_storable, value))
    return not isinstance(value, str) or not re.search("[\ud800-\udfff]", value)


_PROMPT_SOURCES = ("column", "template", "template_file", "messages_column", "token_ids_column")


def _check_combinations(config: RunConfig) -> None:
    """Refuse keys that are each right and cannot go together."""
    prompt, sampling = config.prompt, config.sampling
    sources = {f"prompt.{name}": getattr(prompt, name) for name in _PROMPT_SOURCES if getattr(prompt, name) is not None}
    if len(sources) != 1:
        accepted = f"exactly one of {', '.join(f'prompt.{name}' for name in _PROMPT_SOURCES)}"
        raise ConfigError(" and ".join(sources) or "prompt", [*sources.values()] or None, accepted)
    if sampling.min_tokens > sampling.max_tokens:
        raise ConfigError(
            "sampling.min_tokens", sampling.min_tokens, f"at most sampling.max_tokens={sampling.max_tokens}"
        )
    if config.order.columns is not None and prompt.template is None and prompt.template_file is None:
        raise ConfigError("order.columns", config.order.columns, "null without a template (prompt.template)")
    if prompt.chat == "never":
        if prompt.messages_column is not None:
            raise ConfigError("prompt.chat", "never", "auto or always with prompt.messages_column")
        if prompt.chat_kwargs:
            raise ConfigError("prompt.chat_kwargs", prompt.chat_kwargs, "nothing with prompt.chat=never")
        if prompt.system is not None:
            raise ConfigError("prompt.system", prompt.system, "null with prompt.chat=never")
    if prompt.token_ids_column is not None:
        _check_token_ids(config)


def _check_token_ids(config: RunConfig) -> None:
    """Refuse what has no meaning for prompts that are ready token ids."""
    prompt = config.prompt
    if prompt.chat == "always":
        raise ConfigError("prompt.chat", "always", "auto or never with prompt.token_ids_column")
    if prompt.chat_kwargs:
        raise ConfigError("prompt.chat_kwargs", prompt.chat_kwargs, "nothing with prompt.token_ids_column")
    if prompt.system is not None:
        raise ConfigError("prompt.system", prompt.system, "null with prompt.token_ids_column")
    if config.sink.keep_prompt:
        raise ConfigError("sink.keep_prompt", True, "false with prompt.token_ids_column: there is no prompt text")


_PATHS = ("source.path", "prompt.template_file", "model.path", "model.tokenizer", "sink.path")


def _resolve_paths(config: RunConfig) -> RunConfig:
    """`config` with its paths as the file system knows them; nothing later expands them again."""
    for key in _PATHS:
        section, _, name = key.partition(".")
        given = getattr(config, section)
        if (path := getattr(given, name)) is not None:
            config = dataclasses.replace(config, **{section: dataclasses.replace(given, **{name: _resolve(key, path)})})
    return config


def _resolve(key: str, path: str) -> str:
    try:
        return resolve_path(path)
    except UnresolvedPathError as error:
        raise ConfigError(key, path, f"a path that exists: {error}") from error


# What the operating system says of a path that no folder can have.
_NO_FOLDER = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def _check_folder(path: str) -> None:
    """Refuse an output folder that is a file, or cannot be a folder at all."""
    accepted = "a local folder, new or existing"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        if os.path.lexists(path):
            raise ConfigError("sink.path", path, f"{accepted}; this is a link to nothing") from error
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise ConfigError("sink.path", path, f"{accepted}: {error.strerror}") from error
    else:
        if not stat.S_ISDIR(mode):
            raise ConfigError("sink.path", path, f"{accepted}; this is a file")


def _check_template_file(path: str | None) -> None:
    """Refuse a template that cannot be read, before anything is loaded."""
    if path is None:
        return
    try:
        Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        accepted = f"a readable UTF-8 text file; relative paths start at {Path.cwd()}: {error}"
        raise ConfigError("prompt.template_file", path, accepted) from error
