"""From rows to token ids: text columns, lengths, and what is refused at start."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerFast

from runner.config import ConfigError
from runner.prompt import MODEL_LIMIT, POOL_LIMIT, Prompt, RowError
from tests.prompt_rows import (
    ORDINARY,
    batch_of,
    build,
    builder,
    errors,
    ids,
    plain_tokenizers,
    prompts,
)
from tests.tiny_tokenizer import CHATML, byte_level_tokenizer


@pytest.mark.parametrize("tokenizer", plain_tokenizers())
def test_raw_text_is_tokenised_as_the_tokenizer_does_it(tokenizer: PreTrainedTokenizerFast) -> None:  # trap 28
    found = prompts(tokenizer, batch_of(text=ORDINARY), column="text")
    assert [prompt.token_ids.tolist() for prompt in found] == [tokenizer(text)["input_ids"] for text in ORDINARY]
    assert [prompt.text for prompt in found] == ORDINARY
    assert {prompt.token_ids.dtype for prompt in found} == {np.dtype(np.int32)}


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_kind_of_text_column_is_read(kind: pa.DataType) -> None:
    tokenizer = byte_level_tokenizer()
    column = pa.array(["the fox", "dog", "the fox"]).cast(kind)
    assert ids(tokenizer, batch_of(text=column), column="text") == [
        tokenizer(text)["input_ids"] for text in ("the fox", "dog", "the fox")
    ]


def test_prompt_text_is_kept_only_if_asked() -> None:
    found = prompts(byte_level_tokenizer(), batch_of(text=["x"]), keys={"keep_text": False}, column="text")
    assert found[0].text is None


def test_rows_without_text_are_error_rows_and_the_others_run() -> None:  # trap 42
    columns = batch_of(text=["fine", None, "", " \n\t", "too"])
    results = build(byte_level_tokenizer(), columns, column="text")
    assert [type(result) for result in results] == [Prompt, RowError, RowError, RowError, Prompt]
    assert [result.error for result in results if isinstance(result, RowError)] == [
        "row 71: column 'text' is null; fill or drop the row",
        "row 72: column 'text' is empty; fill or drop the row",
        "row 73: column 'text' is blank; fill or drop the row",
    ]


def test_a_column_of_nulls_makes_error_rows() -> None:
    assert "is null" in errors(byte_level_tokenizer(), batch_of(text=pa.nulls(1)), column="text")[0]


def test_text_that_is_not_utf8_is_an_error_row_alone() -> None:
    column = pa.array([b"fine", b"\xff"]).view(pa.string())
    results = build(byte_level_tokenizer(), batch_of(text=column), column="text")
    assert isinstance(results[0], Prompt)
    assert isinstance(results[1], RowError)
    assert "not valid UTF-8" in results[1].error


def test_ids_beyond_the_model_are_error_rows() -> None:
    error = errors(byte_level_tokenizer(), batch_of(text=["the"]), keys={"vocab_size": 3}, column="text")[0]
    assert "beyond the model's 3" in error


def test_a_batch_without_rows_builds_nothing() -> None:  # trap 54
    columns = batch_of(text=pa.array([], pa.string()))
    assert build(byte_level_tokenizer(), columns, column="text") == []


def test_a_source_without_columns_is_not_refused() -> None:  # trap 54: an empty JSONL file tells no columns
    for config in ({"column": "text"}, {"template": "{{ text }}"}, {"token_ids_column": "ids"}):
        made = builder(byte_level_tokenizer(), pa.schema([]), **config)
        assert {*made.columns} <= {"text", "ids"}


def test_exactly_one_way_to_a_prompt_is_needed() -> None:
    columns = batch_of(text=["x"])
    for config in ({}, {"column": "text", "template": "{{ text }}"}):
        with pytest.raises(ConfigError, match="exactly one of"):
            builder(byte_level_tokenizer(), columns, **config)


def test_missing_columns_and_wrong_types_are_refused() -> None:  # trap 42
    columns = batch_of(text=["x"], number=[1], ids=[[1]], floats=[[0.5]])
    tokenizer = byte_level_tokenizer(chat_template=CHATML)
    for way in ("column", "messages_column", "token_ids_column"):
        with pytest.raises(ConfigError, match=rf"prompt\.{way}: 'absent'.*text, number, ids, floats"):
            builder(tokenizer, columns, **{way: "absent"})
    for config in ({"column": "number"}, {"messages_column": "ids"}, {"token_ids_column": "floats"}):
        with pytest.raises(ConfigError, match="this one is"):
            builder(tokenizer, columns, **config)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        builder(None, batch_of(text=["x"]), column="text")


@pytest.mark.parametrize(("length", "fits"), [(8, True), (9, True), (10, False), (11, False)])
def test_a_prompt_leaves_room_for_one_output_token(length: int, fits: bool) -> None:  # trap 41
    columns = batch_of(ids=[list(range(length))])
    (result,) = build(None, columns, keys={"max_model_len": 10, "max_tokens": 4}, token_ids_column="ids")
    assert isinstance(result, Prompt) == fits
    if isinstance(result, Prompt):
        assert result.token_ids.tolist() == list(range(length))


def test_an_over_long_prompt_is_an_error_row_with_row_length_and_limit() -> None:  # trap 40
    columns = batch_of(ids=[[1], list(range(20)), [2]])
    results = build(None, columns, keys={"max_model_len": 10}, token_ids_column="ids")
    assert isinstance(results[0], Prompt)
    assert isinstance(results[2], Prompt)
    error = results[1]
    assert isinstance(error, RowError)
    assert error.prompt_tokens == 20
    assert error.error.startswith("row 71: the prompt has 20 tokens and the limit is 9;")


@pytest.mark.parametrize(("side", "kept"), [("truncate_left", range(14, 20)), ("truncate_right", range(6))])
def test_truncation_keeps_room_for_the_whole_output(side: str, kept: range) -> None:
    keys = {"max_model_len": 10, "max_tokens": 4}
    columns = batch_of(ids=[list(range(20)), list(range(6))])
    assert ids(None, columns, keys=keys, token_ids_column="ids", on_too_long=side) == [list(kept), list(range(6))]
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: 10"):
        builder(None, columns, keys=keys | {"max_tokens": 10}, token_ids_column="ids", on_too_long=side)


@pytest.mark.parametrize("length", [7, 8, 9, 10, 11])
def test_a_prompt_of_any_length_leaves_the_same_room_where_longer_ones_are_cut(length: int) -> None:
    columns = batch_of(ids=[list(range(length))])
    keys = {"max_model_len": 10, "max_tokens": 4}
    for side in ("truncate_left", "truncate_right"):
        (found,) = ids(None, columns, keys=keys, token_ids_column="ids", on_too_long=side)
        assert len(found) == 6


def test_a_cut_that_takes_the_end_of_a_chat_is_known() -> None:
    columns, tokenizer = batch_of(text=["the fox " * 40]), byte_level_tokenizer(chat_template=CHATML)
    keys = {"max_model_len": 60, "max_tokens": 4}
    sides = ("error", "truncate_left", "truncate_right")
    made = [builder(tokenizer, columns, keys=keys, column="text", on_too_long=side) for side in sides]
    assert [each.cuts_chat_end for each in made] == [False, False, True]
    (left,) = ids(tokenizer, columns, keys=keys, column="text", on_too_long="truncate_left")
    assert tokenizer.decode(left).endswith("<|im_start|>assistant\n")
    bare = {"column": "text", "chat": "never", "on_too_long": "truncate_right"}
    assert len(ids(tokenizer, columns, keys=keys, **bare)[0]) == 56
    assert not builder(tokenizer, columns, keys=keys, **bare).cuts_chat_end


def test_the_limit_that_an_error_row_names_is_the_one_that_holds() -> None:
    columns = batch_of(ids=[list(range(20))])
    for limited_by, key in ((MODEL_LIMIT, "engine.max_model_len"), (POOL_LIMIT, "engine.kv_memory")):
        keys = {"max_model_len": 10, "limited_by": limited_by}
        (error,) = errors(None, columns, keys=keys, token_ids_column="ids")
        assert re.findall(r"engine\.\w+", error) == [key]
