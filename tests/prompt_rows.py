"""Builds prompts from rows written out in a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from runner.config import PromptConfig
from runner.prompt import Prompt, PromptBuilder, RowError
from tests.tiny_tokenizer import CHATML, LLAMA_CHAT, byte_level_tokenizer, metaspace_tokenizer

FIRST_ROW = 70
VOCAB = 500
ORDINARY = [
    "the fox",
    "  two  blanks ",
    "line\nbreak\n",
    "naïve café 日本語 😀",
    "<|im_star t|> <s",
    "a" * 300,
    "\ttab",
    "<think>",
]


def builder(tokenizer: Any, columns: Any, *, keys: Mapping[str, Any] | None = None, **config: Any) -> PromptBuilder:
    schema = columns.schema if isinstance(columns, pa.RecordBatch) else columns
    limits = {"max_model_len": 1000, "max_tokens": 10, "vocab_size": VOCAB, "keep_text": True} | dict(keys or {})
    return PromptBuilder(PromptConfig(**config), schema, tokenizer, **limits)


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def build(
    tokenizer: Any, columns: pa.RecordBatch, *, keys: Mapping[str, Any] | None = None, **config: Any
) -> list[Prompt | RowError]:
    made = builder(tokenizer, columns, keys=keys, **config)
    row_ids = range(FIRST_ROW, FIRST_ROW + columns.num_rows)
    results = made.build(columns.select(list(made.columns)), row_ids)
    assert [result.row_id for result in results] == list(range(FIRST_ROW, FIRST_ROW + columns.num_rows))
    return results


def prompts(*arguments: Any, **config: Any) -> list[Prompt]:
    results = build(*arguments, **config)
    assert all(isinstance(result, Prompt) for result in results), results
    return [result for result in results if isinstance(result, Prompt)]


def ids(*arguments: Any, **config: Any) -> list[list[int]]:
    return [prompt.token_ids.tolist() for prompt in prompts(*arguments, **config)]


def errors(*arguments: Any, **config: Any) -> list[str]:
    results = build(*arguments, **config)
    assert all(isinstance(result, RowError) for result in results), results
    return [result.error for result in results if isinstance(result, RowError)]


def plain_tokenizers() -> list[PreTrainedTokenizerFast]:
    return [byte_level_tokenizer(), byte_level_tokenizer(adds_bos=True), metaspace_tokenizer()]


def chat_tokenizers() -> list[PreTrainedTokenizerFast]:
    return [
        byte_level_tokenizer(chat_template=CHATML),
        byte_level_tokenizer(chat_template=LLAMA_CHAT, adds_bos=True),
        metaspace_tokenizer(chat_template=LLAMA_CHAT),
    ]
