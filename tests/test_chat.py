"""Chats: the model's template, messages columns, and the rows that are none."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerFast

from runner.config import ConfigError
from runner.prompt import Prompt, RowError
from runner.prompt_reader import MessagesReader
from tests.prompt_rows import (
    ORDINARY,
    batch_of,
    build,
    builder,
    chat_tokenizers,
    errors,
    ids,
    prompts,
)
from tests.tiny_tokenizer import CHATML, LLAMA_CHAT, byte_level_tokenizer, metaspace_tokenizer


@pytest.mark.parametrize("tokenizer", chat_tokenizers())
def test_a_chat_is_tokenised_as_transformers_does_it_with_one_first_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # trap 28
    chats = [[{"role": "user", "content": text}] for text in ORDINARY]
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    assert ids(tokenizer, batch_of(text=ORDINARY), column="text") == expected
    assert ids(tokenizer, batch_of(text=ORDINARY), template="{{ text }}") == expected
    assert ids(tokenizer, batch_of(chat=chats), messages_column="chat") == expected
    assert ids(tokenizer, batch_of(chat=[json.dumps(chat) for chat in chats]), messages_column="chat") == expected
    writes_bos = tokenizer.chat_template == LLAMA_CHAT
    assert {found.count(tokenizer.bos_token_id) for found in expected} == {int(writes_bos)}


def test_chat_never_uses_the_text_as_it_is() -> None:
    tokenizer = byte_level_tokenizer(chat_template=CHATML)
    assert ids(tokenizer, batch_of(text=["the"]), column="text", chat="never") == [tokenizer("the")["input_ids"]]


def test_the_job_system_text_gives_way_to_that_of_a_row() -> None:
    chats = [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}],
    ]
    found = prompts(
        byte_level_tokenizer(chat_template=CHATML), batch_of(chat=chats), messages_column="chat", system="job's"
    )
    begin = [str(prompt.text).split("<|im_end|>")[0] for prompt in found]
    assert begin == ["<|im_start|>system\njob's", "<|im_start|>system\nmine"]


def test_chat_kwargs_reach_the_template() -> None:
    tokenizer = byte_level_tokenizer(chat_template="{{ tone }}: {{ messages[0].content }}{{ add_generation_prompt }}")
    found = prompts(tokenizer, batch_of(text=["x"]), column="text", chat_kwargs={"tone": "dry"})
    assert found[0].text == "dry: xTrue"
    with pytest.raises(ConfigError, match=r"prompt\.chat_kwargs"):
        builder(tokenizer, batch_of(text=["x"]), column="text", chat_kwargs={"tokenize": True})


def test_null_fields_of_messages_are_not_seen_by_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.name is defined %}({{ m.name }}){% endif %};{% endfor %}"
    chat = [
        {"role": "user", "content": "a", "name": "Jo"},
        {"role": "assistant", "content": None, "name": None},
    ]
    found = prompts(byte_level_tokenizer(chat_template=template), batch_of(chat=[chat]), messages_column="chat")
    assert found[0].text == "a(Jo);;"
    # Newer releases of transformers drop them too; that must not be needed.
    reader = MessagesReader("chat", batch_of(chat=[chat]).schema)
    assert reader.read(chat) == [chat[0], {"role": "assistant", "content": ""}]


def test_messages_for_a_model_without_chat_template_are_refused_at_start() -> None:  # trap 34
    columns = batch_of(chat=[[{"role": "user", "content": "x"}]], text=["x"])
    for config in ({"messages_column": "chat"}, {"column": "text", "chat": "always"}):
        with pytest.raises(ConfigError, match="chat template"):
            builder(byte_level_tokenizer(), columns, **config)


@pytest.mark.parametrize("key", [{"system": "be brief"}, {"chat_kwargs": {"a": 1}}])
def test_keys_of_a_chat_without_a_chat_are_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        builder(byte_level_tokenizer(), batch_of(text=["x"]), column="text", **key)
    with pytest.raises(ConfigError, match=r"prompt\.chat is never"):
        builder(byte_level_tokenizer(chat_template=CHATML), batch_of(text=["x"]), column="text", chat="never", **key)


def test_messages_that_the_template_refuses_make_error_rows() -> None:  # trap 35
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "y"}
    columns = batch_of(chat=[[user], [system, user], [user, user]])
    results = build(metaspace_tokenizer(chat_template=LLAMA_CHAT), columns, messages_column="chat")
    assert isinstance(results[0], Prompt)
    assert [result.error for result in results if isinstance(result, RowError)] == [
        "row 71: the model's chat template refuses the messages: System role not supported",
        "row 72: the model's chat template refuses the messages: Conversation roles must alternate",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is null"),
        ("", "is empty"),
        ("[]", "is an empty list"),
        ("null", "is null"),
        ("[{", "is not JSON"),
        ('{"role": "user"}', "must hold a list of messages"),
        ('["x"]', "must hold a list of messages"),
        ('[{"content": "x"}]', "each with a role"),
        ('[{"role": "user", "content": " "}]', "has no message with text"),
        ('[{"role": "user", "content": "\\ud800"}]', "surrogates"),
    ],
)
def test_messages_that_are_none_make_error_rows(value: str | None, message: str) -> None:  # trap 42
    columns = batch_of(chat=pa.array([value], pa.string()))
    (error,) = errors(byte_level_tokenizer(chat_template=CHATML), columns, messages_column="chat")
    assert error.startswith("row 70: column 'chat'")
    assert message in error


def test_lists_of_messages_that_are_none_make_error_rows() -> None:  # trap 42
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    columns = batch_of(chat=pa.array([None, [], [None], [{"role": None, "content": "x"}]], kind))
    found = errors(byte_level_tokenizer(chat_template=CHATML), columns, messages_column="chat")
    for error, message in zip(found, ("is null", "is an empty list", "with a role", "with a role"), strict=True):
        assert message in error
