"""A prompt template cut into sections, one for each value that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Template

from runner.prompt_template import template_environment, with_nulls
from runner.row_problem import RowProblem

_STATEMENTS = ("block_begin", "raw_begin", "linestatement_begin")


@dataclass(frozen=True)
class Section:
    """A value with its surroundings: the label before it on its line, and what follows up to the next label.

    `name` is the expression as the template writes it.
    """

    name: str
    before: str
    expression: Template
    after: str

    def render(self, row: Mapping[str, Any]) -> str:
        """The section's text in one row. Raises RowProblem where the expression fails on it."""
        try:
            return f"{self.before}{self.expression.render(with_nulls(dict(row)))}{self.after}"
        # An expression computes with whatever the row holds, so it can fail like any code.
        except Exception as error:
            raise RowProblem(f"{self.name} fails on this row: {error}") from error


@dataclass(frozen=True)
class TemplateSections:
    """A template as `head`, which comes before the first label, `sections` in order, and `tail`."""

    head: str
    sections: tuple[Section, ...]
    tail: str


def split_template(source: str) -> TemplateSections | None:
    """The sections of a template that is text and `{{ }}` alone; None for one with statements, whose parts depend."""
    found = _texts_and_expressions(source)
    if found is None or not found[1]:
        return None
    texts, expressions = found
    environment = template_environment(None)
    cuts = [text.rfind("\n") + 1 for text in texts]
    sections = [
        Section(
            name=expression.strip(),
            before=texts[at][cuts[at] :],
            expression=environment.from_string(f"{{{{{expression}}}}}"),
            after=texts[at + 1][: cuts[at + 1]] if at + 1 < len(expressions) else "",
        )
        for at, expression in enumerate(expressions)
    ]
    return TemplateSections(texts[0][: cuts[0]], tuple(sections), texts[-1])


def _texts_and_expressions(source: str) -> tuple[list[str], list[str]] | None:
    """The literal texts of a template and the expressions between them; None where it has statements."""
    texts, expressions = [""], []
    inside: str | None = None
    for _, kind, value in template_environment(None).lex(source):
        if kind in _STATEMENTS:
            return None
        if kind == "data":
            texts[-1] += value
        elif kind == "variable_begin":
            inside = ""
        elif kind == "variable_end":
            expressions.append(inside or "")
            texts.append("")
            inside = None
        elif inside is not None:  # the rest is comments
            inside += value
    return texts, expressions
