"""The job's own template over columns."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerFast

from runner.config import ConfigError
from tests.prompt_rows import (
    batch_of,
    builder,
    errors,
    ids,
    plain_tokenizers,
    prompts,
)
from tests.tiny_tokenizer import byte_level_tokenizer


def test_a_template_renders_columns_nulls_and_its_own_newline() -> None:
    columns = batch_of(
        name=["fox", None],
        tags=[["a", None], None],
        about=[{"legs": 4, "note": None}, {"legs": 2**53 + 1, "note": "n"}],
    )
    template = (
        "{{ name }}|{{ name | trim }}|{{ name ~ '!' }}|{% for t in tags %}[{{ t }}]{% endfor %}"
        "|{{ about.legs }}{{ about.note }}|{{ name is none }}{{ name != none }}|{{ about | tojson }}\n"
    )
    found = prompts(byte_level_tokenizer(), columns, template=template)
    assert [prompt.text for prompt in found] == [
        'fox|fox|fox!|[a][]|4|FalseTrue|{"legs": 4, "note": null}\n',
        '||!||9007199254740993n|TrueFalse|{"legs": 9007199254740993, "note": "n"}\n',
    ]


def test_nulls_in_a_map_render_as_empty_text() -> None:
    columns = batch_of(m=pa.array([[("a", None), ("b", "x")]], pa.map_(pa.string(), pa.string())))
    template = "{% for key, value in m %}{{ key }}={{ value ~ '' }};{% endfor %}{{ m | tojson }}"
    assert prompts(byte_level_tokenizer(), columns, template=template)[0].text == 'a=;b=x;[["a", null], ["b", "x"]]'


def test_a_template_file_reads_only_the_columns_it_names(tmp_path: Path) -> None:
    file = tmp_path / "prompt.jinja"
    file.write_text("{% set n = 2 %}{{ range(n) | list }} {{ b }}{{ a }} ✓", encoding="utf-8")
    columns = batch_of(a=["x"], unused=[1], b=["y"])
    made = builder(byte_level_tokenizer(), columns, template_file=str(file))
    assert made.columns == ("a", "b")
    assert prompts(byte_level_tokenizer(), columns, template_file=str(file))[0].text == "[0, 1] yx ✓"


def test_an_unknown_column_in_a_template_fails_at_start_listing_the_columns() -> None:  # trap 53
    with pytest.raises(ConfigError, match="columns id, text; unknown: question, title"):
        builder(byte_level_tokenizer(), batch_of(id=[1], text=["x"]), template="{{ question }}{{ title }}{{ text }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [("a\n{{ text", "line 2"), ("{% include 'x' %}{{ text }}", "cannot include"), ("no column", "uses a column")],
)
def test_a_template_that_cannot_work_is_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        builder(byte_level_tokenizer(), batch_of(text=["x"]), template=template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ about.missing }}", "row 70: prompt.template fails on this row: .*missing"),
        ("{{ 1 // about.zero }}", "ZeroDivisionError"),
        ("{{ about.__class__.__mro__ }}", "unsafe|no attribute"),
        ("{% if about.zero %}x{% endif %}\n", r"prompt.template renders to blank text.*'about'"),
    ],
)
def test_a_template_that_fails_on_a_row_makes_an_error_row(template: str, message: str) -> None:
    (error,) = errors(byte_level_tokenizer(), batch_of(about=[{"zero": 0}]), template=template)
    assert re.search(message, error)


@pytest.mark.parametrize("tokenizer", plain_tokenizers())
def test_a_template_that_writes_the_first_token_itself_has_it_once(tokenizer: PreTrainedTokenizerFast) -> None:
    # trap 28
    (found,) = ids(tokenizer, batch_of(text=["the fox"]), template=f"{tokenizer.bos_token}{{{{ text }}}}")
    assert found.count(tokenizer.bos_token_id) == 1
    assert found[0] == tokenizer.bos_token_id
