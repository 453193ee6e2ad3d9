"""What makes two runs the same run: `run.json`, written once and compared at every start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from runner.records import read_object

FORMAT_VERSION = 2
"""Of the files in the output folder; a change makes older folders refused, not misread."""

_VERSIONS = "versions"
_ABSENT = "(absent)"
_MAX_SHOWN = 80
# Those of the section `source` that are settings; the others describe the input.
_SOURCE_KEYS = ("source.skip", "source.limit")
# Facts whose key is called otherwise.
_SETTINGS = {"id_column": "source.id_column", "model.max_model_len": "engine.max_model_len"}
_COLUMN_KEYS = "source.id_column, sink.keep_columns, sink.token_ids and sink.keep_prompt"


class FingerprintError(Exception):
    """The folder holds the output of a different run: exit code 2. `key` is the first that differs."""

    def __init__(self, path: Path, key: str, difference: str, remedy: str) -> None:
        self.key = key
        super().__init__(
            f"{path}: {difference}. {remedy}, start over with resume=restart (which discards the committed output), "
            "or choose another sink.path."
        )


class Fingerprint:
    """The facts that decide the output, as JSON keeps them. `facts` may nest; its values are JSON's."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts: dict[str, Any] = json.loads(_canonical({"format_version": FORMAT_VERSION, **facts}))
        self.digest = hashlib.sha256(_canonical(self._facts).encode()).hexdigest()

    def as_json(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """The content of `run.json`; library `versions` are kept there and not compared."""
        return {**self._facts, _VERSIONS: dict(versions)}

    def check(self, path: Path) -> None:
        """Compare with the fingerprint in a file.

        Raises:
            FingerprintError: they differ.
            LedgerError: the file is unreadable.
        """
        recorded = read_object(path)
        recorded.pop(_VERSIONS, None)
        for key, old, new in _differences("", recorded, self._facts):
            if key.startswith("source.") and key not in _SOURCE_KEYS:
                before, now = _input(recorded["source"]), _input(self._facts["source"])
                difference = (
                    "the input is another one or was changed: "
                    f"it was {before} when this output was started and is {now} now"
                )
                raise FingerprintError(path, key, difference, "Put that input back (source.path)")
            before, now = _shown_apart(old, new)
            difference = f"{_SETTINGS.get(key, key)} was {before} when this output was started and is {now} now"
            raise FingerprintError(path, key, difference, _remedy(key))


def _remedy(key: str) -> str:
    """How to come back to the recorded run."""
    if key.startswith("model.files"):
        return "Put that model back (model.path)"
    if key.startswith("model.tokenizer."):
        return "Put that tokenizer back (model.tokenizer)"
    if key == "format_version":
        return "Go on with the version of pagebatch that wrote it"
    return f"Set {_COLUMN_KEYS if key.startswith('columns.') else _SETTINGS.get(key, key)} back"


def _input(facts: Mapping[str, Any]) -> str:
    """An input as its facts describe it: its path or the first of its files, and its rows."""
    files = facts.get("files") or ()
    name = facts.get("path") or (files[0].get("path") if files else None) or "no file"
    more = f" and {len(files) - 1:,} more" if len(files) > 1 and "path" not in facts else ""
    split = f", split {facts['split']}" if facts.get("split") else ""
    return f"{name}{more}{split} ({facts.get('rows')} rows)"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _differences(prefix: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys at which two JSON values differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            path = f"{prefix}.{key}" if prefix else key
            yield from _differences(path, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{prefix}[{index}]", *pair)
    elif old != new:
        yield prefix, old, new


def _shown_apart(one: object, other: object) -> tuple[str, str]:
    """Two values that differ, both cut to the same place around the first difference."""
    texts = ["absent" if value == _ABSENT else "null" if value is None else repr(value) for value in (one, other)]
    if max(map(len, texts)) <= _MAX_SHOWN:
        return texts[0], texts[1]
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, alike - _MAX_SHOWN // 2)
    ends = [start + _MAX_SHOWN < len(text) for text in texts]
    cut = [
        f"{'…' * (start > 0)}{text[start : start + _MAX_SHOWN]}{'…' * end}"
        for text, end in zip(texts, ends, strict=True)
    ]
    return cut[0], cut[1]
