import pytest

from runner.row_problem import RowProblem
from runner.template_sections import split_template


def names(source: str) -> list[str] | None:
    parts = split_template(source)
    return None if parts is None else [section.name for section in parts.sections]


def test_a_label_goes_with_its_value_and_what_stands_before_and_after_them_stays():
    parts = split_template("Answer briefly.\n\nQuestion: {{ q }}\nDocument: {{ doc.text|trim }}\nAnswer:")
    assert parts is not None
    assert (parts.head, parts.tail) == ("Answer briefly.\n\n", "\nAnswer:")
    row = {"q": "why?", "doc": {"text": " so "}}
    assert [section.name for section in parts.sections] == ["q", "doc.text|trim"]
    assert [section.render(row) for section in parts.sections] == ["Question: why?\n", "Document: so"]


def test_the_sections_in_the_templates_own_order_are_the_prompt():
    source = "{# note #}About {{ a }}, {{ b }}\n{{- c -}}  \nend"
    parts = split_template(source)
    assert parts is not None
    row = {"a": "x", "b": None, "c": "z"}
    assert parts.head + "".join(each.render(row) for each in parts.sections) + parts.tail == "About x, zend"


@pytest.mark.parametrize("source", ["{% if a %}{{ a }}{% endif %} {{ b }}", "{% raw %}{{ a }}{% endraw %}", "plain"])
def test_a_template_with_statements_or_without_values_has_no_sections(source: str):
    assert names(source) is None


def test_an_expression_that_fails_is_a_problem_of_the_row():
    parts = split_template("{{ a + 1 }}")
    assert parts is not None
    with pytest.raises(RowProblem, match=r"a \+ 1 fails on this row"):
        parts.sections[0].render({"a": "text"})
