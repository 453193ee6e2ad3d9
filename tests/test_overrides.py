import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from runner.config import ConfigError
from runner.overrides import prepare, quoted


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text('\\"a'))
def test_a_quoted_text_is_read_back_exactly(text: str) -> None:
    override = OverridesParser.create().parse_override(f"prompt.system={quoted(text)}")
    assert override.value() == text


@pytest.mark.parametrize(
    "value",
    ["你好", "🙂 hello", "a # b", "a=b", "{{ message }}", "{a}", "{a: b}", "[a]", "Hello, you", "don't", "é", "(x"],
)
def test_a_text_that_hydra_cannot_read_is_answered_with_its_quoted_form(value: str) -> None:  # trap 52
    with pytest.raises(ConfigError) as caught:
        prepare([f"prompt.template={value}"])
    assert caught.value.key == "prompt.template"
    typed = shlex.split(caught.value.accepted.partition("for a shell: ")[2])
    assert len(typed) == 1
    prepared = prepare(typed)
    assert OverridesParser.create().parse_override(prepared[0]).value() == value


def test_a_list_of_texts_is_answered_with_each_text_quoted() -> None:  # trap 52
    with pytest.raises(ConfigError) as caught:
        prepare(["sampling.stop=[终,#]"])
    typed = shlex.split(caught.value.accepted.partition("for a shell: ")[2])
    assert OverridesParser.create().parse_override(prepare(typed)[0]).value() == ["终", "#"]


def test_a_text_key_takes_numbers_and_truth_values_as_they_were_typed() -> None:
    parser = OverridesParser.create()
    for value in ("1e3", "0x10", "1_000", "true", "12"):
        assert parser.parse_override(prepare([f"source.id_column={value}"])[0]).value() == value
    assert parser.parse_override(prepare(["source.id_column=null"])[0]).value() is None


@pytest.mark.parametrize(("typed", "read"), [("True", "true"), ("FALSE", "false"), ("auto", "auto"), ("on", "on")])
def test_a_truth_value_among_choices_may_be_capitalised(typed: str, read: str) -> None:
    prepared = prepare([f"engine.cuda_graphs={typed}"])
    assert OverridesParser.create().parse_override(prepared[0]).value() == read


def test_arguments_of_the_chat_template_need_no_plus() -> None:
    assert prepare(["prompt.chat_kwargs.enable_thinking=false"]) == ["++prompt.chat_kwargs.enable_thinking=false"]
    assert prepare(["prompt.chat_kwargs={a: 1}"]) == ["++prompt.chat_kwargs={a: 1}"]


@pytest.mark.parametrize(
    ("argument", "accepted"),
    [("prompt.chat_kwargs=[a]", "a mapping"), ("sampling.stop={a: b}", "a list"), ("sampling.stop=[a", "in quotes")],
)
def test_a_value_of_another_shape_is_refused_under_its_key(argument: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare([argument])
    assert caught.value.key == argument.partition("=")[0]
    assert accepted in caught.value.accepted


@pytest.mark.parametrize("argument", ["engine.blocksize=32", "+engine.extra=1", "hydra.run.dir=x", "~sampling=x"])
def test_an_unknown_key_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="the keys are"):
        prepare([argument])


def test_an_argument_that_is_no_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="job=NAME"):
        prepare(["demo"])


def test_a_section_takes_the_name_of_a_preset_only() -> None:
    assert prepare(["sampling=creative"]) == ["sampling=creative"]
    with pytest.raises(ConfigError, match=r"sampling\.KEY"):
        prepare(["sampling=3"])
