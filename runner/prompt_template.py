"""The job's own prompt template: Jinja over the columns of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runner.config import ConfigError
from runner.control_tokens import ControlTokens
from runner.prompt_literals import rewrite_literals
from runner.row_problem import RowProblem


class _NullText(str):
    """A null value in a template: renders as empty text, also through filters and `~`, yet equals none."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_NULL = _NullText()


def with_nulls(value: Any) -> Any:
    """A row's value as templates see it: null as empty text, at any depth."""
    if value is None:
        return _NULL
    if isinstance(value, list):
        return [with_nulls(each) for each in value]
    if isinstance(value, tuple):  # an entry of a map
        return tuple(with_nulls(each) for each in value)
    if isinstance(value, dict):
        return {key: with_nulls(each) for key, each in value.items()}
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, _NullText):
        return None
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items()}
    return value


def template_environment(control: ControlTokens | None) -> ImmutableSandboxedEnvironment:
    """The Jinja that templates are written in; for `control`, see `PromptTemplate`."""

    def dumps(value: Any, **options: Any) -> str:
        """What the `tojson` filter writes: null for null, and the template's own text as it reads."""
        value = _without_nulls(value)
        return json.dumps(value if control is None else control.unalias_within(value), **options)

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        # A method called in the template may still return None.
        finalize=lambda value: "" if value is None else value,
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, _NullText)
    environment.policies["json.dumps_function"] = dumps
    return environment


class PromptTemplate:
    """A compiled template, given as `value` under the configuration key `key`.

    `columns` are the ones it reads, in the order of `known_columns`. No known columns means that they are
    not known, as of an input without rows: then any is accepted. With `control`, the control tokens that the
    template itself writes are aliased in its text.

    Raises:
        ConfigError: a syntax error, an unknown column, or a template that needs other files.
    """

    def __init__(
        self, key: str, value: str, source: str, known_columns: list[str], control: ControlTokens | None
    ) -> None:
        environment = template_environment(control)
        try:
            tree = environment.parse(source)
            if control is not None:
                source = rewrite_literals(source, environment, control.alias)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(key, value, f"a Jinja template; line {error.lineno}: {error.message}") from error
        if any(True for _ in meta.find_referenced_templates(tree)):
            raise ConfigError(key, value, "one template; it cannot include or import others")
        names = meta.find_undeclared_variables(tree)
        unknown = sorted(names - {*known_columns} - {*environment.globals}) if known_columns else []
        if unknown:
            accepted = f"a template over the columns {', '.join(known_columns)}; unknown: {', '.join(unknown)}"
            raise ConfigError(key, value, accepted)
        self._key = key
        self.columns = tuple(name for name in known_columns if name in names)
        if known_columns and not self.columns:
            raise ConfigError(key, value, f"a template that uses a column, such as {{{{ {known_columns[0]} }}}}")

    def render(self, row: Mapping[str, Any]) -> str:
        """The text of one row.

        Raises:
            RowProblem: the template fails on these values.
        """
        try:
            return self._template.render(row)
        # A template computes with whatever the row holds, so it can fail like any code.
        except Exception as error:
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise RowProblem(f"{self._key} fails on this row: {kind}{error}") from error
