"""What a template writes of its own, and what it holds against values."""

from __future__ import annotations

import pytest
from jinja2 import Environment, TemplateSyntaxError

from runner.prompt_literals import rewrite_literals

COMPACT = Environment(trim_blocks=True, lstrip_blocks=True)
EXACT = Environment(keep_trailing_newline=True)


def rendered(source: str, environment: Environment = EXACT) -> str:
    """The rewritten template, rendered: what it writes of X has become Y with signs that need escapes."""
    reading = environment.overlay(keep_trailing_newline=True)
    rewritten = rewrite_literals(source, reading, lambda text: text.replace("X", "\"Y'\\\U000f0000"))
    return environment.from_string(rewritten).render(a="aXb").replace("\"Y'\\\U000f0000", "Y")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("X{{ a }}X", "YaXbY"),
        ("{{ 'X' + a ~ \"X\" }}", "YaXbY"),
        ("{{ '\\x58' }}{{ 'X' 'X' }}", "YYY"),
        ("{% raw %}{{ X }}{% endraw %}", "{{ Y }}"),
        ("{# X #}{% set X = 1 %}{{ X }}", "1"),
        ("{{ a.replace('b', 'X') }}{{ ['1', '2'] | join('X') }}", "aXY1Y2"),
        ("{{ {'X': 'X'}['X'] }}", "Y"),
        ("{{ namespace(end='X').end }}{{ 'X' if a else '' }}", "YY"),
    ],
)
def test_what_a_template_writes_is_rewritten(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'X' in a }}{{ 'X' not in a }}{{ a in 'aXb' }}", "TrueFalseTrue"),
        ("{{ a == 'aXb' }}{{ 'aXb' != a }}", "TrueFalse"),
        ("{{ a.split('X') | join }}{{ a.startswith( 'aX' ) }}", "abTrue"),
        ("{{ a | replace('X', '') }}{{ a.replace('X', 'X') }}", "abaYb"),
    ],
)
def test_what_is_held_against_values_stays(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "  {% if a %}\n  X\n  {%- endif %}\n\n{{ a -}}\n  b\n",
        "  {%+ if a %} {{- a }}\n{% endif %}\n\n\n",
        "{% for c in a %}\n    {# note #}\n  {{ c }}\n{% endfor -%}\n\n end",
        "a\r\nb{% raw -%}\n {{ x }} {%- endraw %}\r\n",
    ],
)
@pytest.mark.parametrize("environment", [COMPACT, EXACT])
def test_blanks_and_newlines_are_as_before(source: str, environment: Environment) -> None:
    reading = environment.overlay(keep_trailing_newline=True)
    rewritten = rewrite_literals(source, reading, lambda text: text)
    assert environment.from_string(rewritten).render(a="aXb") == environment.from_string(source).render(a="aXb")


def test_a_source_that_is_no_template_is_refused() -> None:
    with pytest.raises(TemplateSyntaxError):
        rendered("{{ a ) }}")
