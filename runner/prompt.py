"""From rows to token ids: every row becomes a prompt, or an error row that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from runner.chat import open_chat
from runner.config import ConfigError, PromptConfig
from runner.control_tokens import ControlTokens
from runner.prompt_reader import MessagesReader, PromptReader, TemplateReader, TextReader
from runner.row_problem import RowProblem
from runner.token_column import TokenIdsReader

TokenIds = npt.NDArray[np.int32]

MODEL_LIMIT = "raise engine.max_model_len if the model allows it"
POOL_LIMIT = "raise engine.kv_memory, as the K/V pool holds no more"

_WAYS = ("column", "template", "template_file", "messages_column", "token_ids_column")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row that can run: `token_ids` is int32 [tokens], `text` the rendered prompt where it was asked for."""

    row_id: int
    token_ids: TokenIds
    text: str | None = None


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that cannot run, and why; `prompt_tokens` is its length where it got that far."""

    row_id: int
    error: str
    prompt_tokens: int = 0


class PromptBuilder:
    """Builds the prompts of a job; `columns` are the source's columns that it reads.

    Everything that can be refused without the weights is refused by the constructor. `limited_by` says what
    would raise `max_model_len`: `MODEL_LIMIT` or `POOL_LIMIT`. `cuts_chat_end` tells that a cut prompt loses the end
    of the chat template, which begins the answer.

    Raises:
        ConfigError: names the key of `prompt` (or `sampling.max_tokens`) that cannot work with this source,
            tokenizer and model length.
    """

    def __init__(
        self,
        config: PromptConfig,
        schema: pa.Schema,
        tokenizer: Any,
        *,
        max_model_len: int,
        max_tokens: int,
        vocab_size: int,
        keep_text: bool,
        limited_by: str = MODEL_LIMIT,
    ) -> None:
        way = _chosen_way(config)
        self._limit = _LengthLimit(config.on_too_long, max_model_len, max_tokens, limited_by)
        self._encoder: _IdsEncoder | _TextEncoder
        self.cuts_chat_end = False
        if way == "token_ids_column":
            self._encoder = _IdsEncoder(config, schema, vocab_size)
        elif tokenizer is None:
            raise ConfigError(
                f"prompt.{way}", getattr(config, way), "prompt.token_ids_column, as there is no tokenizer"
            )
        else:
            self._encoder = _TextEncoder(config, schema, tokenizer, vocab_size, keep_text)
            self.cuts_chat_end = self._encoder.uses_chat and config.on_too_long == "truncate_right"
        self.columns: tuple[str, ...] = self._encoder.columns

    def build(self, table: pa.RecordBatch, row_ids: Sequence[int]) -> list[Prompt | RowError]:
        """One result for every row of `table`, in order; row i is row `row_ids[i]` of the source.

        The text of a prompt is kept untruncated.
        """
        results: list[Prompt | RowError] = []
        for row_id, encoded in zip(row_ids, self._encoder.encode(table), strict=True):
            if isinstance(encoded, RowProblem):
                results.append(RowError(row_id, f"row {row_id}: {encoded}"))
            else:
                results.append(self._limit.apply(Prompt(row_id, *encoded)))
        return results


_Encoded = tuple[TokenIds, str | None] | RowProblem


class _LengthLimit:
    """A prompt leaves room for one output token at least, or for `max_tokens` where longer ones are cut."""

    def __init__(self, on_too_long: str, max_model_len: int, max_tokens: int, limited_by: str) -> None:
        if on_too_long != "error" and max_tokens >= max_model_len:
            raise ConfigError(
                "sampling.max_tokens",
                max_tokens,
                f"less than the model length {max_model_len} with {on_too_long}; or {limited_by}",
            )
        self._on_too_long = on_too_long
        self._longest = max_model_len - (1 if on_too_long == "error" else max_tokens)
        self._limited_by = limited_by

    def apply(self, prompt: Prompt) -> Prompt | RowError:
        length = len(prompt.token_ids)
        if length <= self._longest:
            return prompt
        if self._on_too_long == "error":
            return RowError(
                prompt.row_id,
                f"row {prompt.row_id}: the prompt has {length} tokens and the limit is {self._longest}; shorten it, "
                f"{self._limited_by}, or set prompt.on_too_long",
                length,
            )
        left = self._on_too_long == "truncate_left"
        kept = prompt.token_ids[-self._longest :] if left else prompt.token_ids[: self._longest]
        return Prompt(prompt.row_id, kept.copy(), prompt.text)


class _IdsEncoder:
    """Ready token ids, passed on."""

    def __init__(self, config: PromptConfig, schema: pa.Schema, vocab_size: int) -> None:
        assert config.token_ids_column is not None
        if config.chat == "always":
            raise ConfigError("prompt.chat", config.chat, "auto or never with prompt.token_ids_column")
        for key in ("system", "chat_kwargs"):
            if getattr(config, key):
                raise ConfigError(f"prompt.{key}", getattr(config, key), "nothing with prompt.token_ids_column")
        self._reader = TokenIdsReader(config.token_ids_column, schema, vocab_size)
        self.columns: tuple[str, ...] = self._reader.columns

    def encode(self, table: pa.RecordBatch) -> Sequence[_Encoded]:
        """The ids of every row."""
        return [ids if isinstance(ids, RowProblem) else (ids, None) for ids in self._reader.read(table)]


class _TextEncoder:
    """Text or messages, rendered row by row and tokenised batch by batch."""

    def __init__(
        self, config: PromptConfig, schema: pa.Schema, tokenizer: Any, vocab_size: int, keep_text: bool
    ) -> None:
        if not config.special_tokens and not tokenizer.is_fast:
            accepted = "true with this tokenizer: only one of the tokenizers library can keep control tokens apart"
            raise ConfigError("prompt.special_tokens", config.special_tokens, accepted)
        self._control = None if config.special_tokens else ControlTokens(tokenizer)
        self._reader = _open_reader(config, schema, self._control)
        self._chat = open_chat(config, tokenizer, self._control)
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self._added_bos = bos if self._adds_special_tokens and tokenizer("")["input_ids"][:1] == [bos] else None
        self._vocab_size = vocab_size
        self._keep_text = keep_text
        self.columns: tuple[str, ...] = self._reader.columns

    def encode(self, table: pa.RecordBatch) -> Sequence[_Encoded]:
        """The ids of every row: one call of the tokenizer for all whose values spell no control token."""
        results: list[_Encoded | None] = []
        plain: list[tuple[int, str]] = []
        for index, value in enumerate(self._reader.values(table)):
            try:
                text = self._render(value)
                if self._control is not None and self._control.spelled_in(text):
                    results.append(self._encode_exactly(text, self._control))
                else:
                    results.append(None)
                    plain.append((index, text if self._control is None else self._control.unalias(text)))
            except RowProblem as problem:
                results.append(problem)
        for (index, text), ids in zip(plain, self._tokenize([text for _, text in plain]), strict=True):
            results[index] = self._finish(ids, text)
        return [result for result in results if result is not None]

    def _render(self, value: Any) -> str:
        """The text of a row, with aliases for the control tokens that it is to have."""
        prompt = self._reader.read(value)
        if self._chat is not None:
            return self._chat.render(prompt)
        assert isinstance(prompt, str)  # messages are refused without a chat
        return prompt

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=self._adds_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _encode_exactly(self, text: str, control: ControlTokens) -> _Encoded:
        ids = control.encode(text, add_special_tokens=self._adds_special_tokens)
        return self._finish(ids, control.unalias(text))

    @property
    def uses_chat(self) -> bool:
        """Whether prompts go through the chat template."""
        return self._chat is not None

    @property
    def _adds_special_tokens(self) -> bool:
        """A chat template writes all special tokens itself; raw text gets the tokenizer's own."""
        return self._chat is None

    def _finish(self, ids: list[int], text: str) -> _Encoded:
        tokens = np.array(ids, dtype=np.int32)
        if self._added_bos is not None and ids[:2] == [self._added_bos] * 2:
            tokens = tokens[1:]  # the job's own template begins with the token that the tokenizer adds
        if not len(tokens):
            return RowProblem("the prompt has no tokens: the tokenizer drops all of its text; fill or drop the row")
        if tokens.max() >= self._vocab_size:
            return RowProblem(
                f"the tokenizer gives token id {tokens.max()}, beyond the model's {self._vocab_size}; "
                "set model.tokenizer to the model's own"
            )
        return tokens, text if self._keep_text else None


def _chosen_way(config: PromptConfig) -> str:
    """The one key that says where prompts come from."""
    chosen = [way for way in _WAYS if getattr(config, way) is not None]
    if len(chosen) != 1:
        raise ConfigError("prompt", chosen or None, f"exactly one of {', '.join(f'prompt.{way}' for way in _WAYS)}")
    return chosen[0]


def _open_reader(config: PromptConfig, schema: pa.Schema, control: ControlTokens | None) -> PromptReader:
    if config.column is not None:
        return TextReader(config.column, schema)
    if config.messages_column is not None:
        return MessagesReader(config.messages_column, schema)
    return TemplateReader(*read_template(config), schema, control)


def read_template(config: PromptConfig) -> tuple[str, str, str]:
    """The key that gives the job's template, its value, and the template. Raises ConfigError for a file not there."""
    if config.template is not None:
        return "prompt.template", config.template, config.template
    assert config.template_file is not None
    try:
        source = Path(config.template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompt.template_file", config.template_file, f"a readable UTF-8 file: {error}") from error
    return "prompt.template_file", config.template_file, source
