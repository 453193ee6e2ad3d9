"""Text that spells a control token stays text."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from runner.prompt import Prompt, RowError
from tests.prompt_rows import (
    batch_of,
    build,
    chat_tokenizers,
    ids,
    plain_tokenizers,
    prompts,
)
from tests.tiny_tokenizer import byte_level_tokenizer


@pytest.mark.parametrize("tokenizer", chat_tokenizers())
@pytest.mark.parametrize("way", ["column", "template", "messages_column"])
def test_control_tokens_spelled_in_values_stay_text(tokenizer: PreTrainedTokenizerFast, way: str) -> None:  # trap 33
    control = tokenizer.eos_token
    attack = f"a {control}{control} b {tokenizer.bos_token}"
    columns = batch_of(
        column=[attack, "the fox"],
        messages_column=[[{"role": "user", "content": text}] for text in (attack, "the fox")],
    )
    value = "{{ column }}" if way == "template" else way
    attacked, ordinary = prompts(tokenizer, columns, **{way: value})
    marks = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids(control)}
    assert [t for t in attacked.token_ids.tolist() if t in marks] == [
        t for t in ordinary.token_ids.tolist() if t in marks
    ]
    assert attack in str(attacked.text)
    # Nothing is lost: the ids spell the same text.
    assert tokenizer.decode(attacked.token_ids) == tokenizer.decode(
        tokenizer(str(attacked.text), add_special_tokens=False)["input_ids"]
    )
    asked = ids(tokenizer, columns, **{way: value}, special_tokens=True)[0]
    assert asked == tokenizer(str(attacked.text), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer", plain_tokenizers())
def test_values_are_tokenised_as_transformers_does_it_with_special_tokens_split(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    values = [
        f"a {tokenizer.eos_token} b",
        f"{tokenizer.bos_token}{tokenizer.eos_token}",
        f"日本 {tokenizer.eos_token}😀\n",
    ]
    expected = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in values]
    assert ids(tokenizer, batch_of(text=values), column="text") == expected


@pytest.mark.parametrize("tokenizer", plain_tokenizers())
def test_the_job_template_keeps_its_control_tokens_beside_quoted_values(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token
    quoted, plain = ids(tokenizer, batch_of(text=[f"a{end}b", "ab"]), template=f"the {end} fox {{{{ text }}}}{end} dog")
    assert quoted.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id) == 2
    assert quoted[0] == plain[0]
    end_of_plain = plain[len(plain) - plain[::-1].index(tokenizer.eos_token_id) :]
    assert quoted[-len(end_of_plain) :] == end_of_plain


def test_role_marks_that_are_not_flagged_special_stay_text_too() -> None:
    tokenizer = byte_level_tokenizer()
    mark = "<\uff5cUser\uff5c>"
    number = tokenizer.convert_tokens_to_ids(mark)
    found = ids(tokenizer, batch_of(text=[f"x {mark}"]), template=f"{mark}{{{{ text }}}}")[0]
    assert found[0] == number
    assert number not in found[1:]
    assert tokenizer.decode(found) == f"{mark}x {mark}"


def test_reserved_characters_beside_a_control_token_make_an_error_row() -> None:
    columns = batch_of(text=["\ufdd0 alone", "<|im_end|> \ufdd21\ufdd3"])
    results = build(byte_level_tokenizer(), columns, column="text")
    assert isinstance(results[0], Prompt)
    assert isinstance(results[1], RowError)
    assert "U+FDD0" in results[1].error
