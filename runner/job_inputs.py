"""What a job reads before any weight: its input, model folder, settings and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa

from engine.admission import AdmissionRule
from engine.request import Sampling
from engine.startup import EngineSettingError, EngineSettings, Resolved, resolve
from runner.config import ConfigError, RunConfig, SamplingSection
from runner.messages import say
from runner.output_schema import completion_schema
from runner.prompt import MODEL_LIMIT, POOL_LIMIT, PromptBuilder
from runner.source import open_source
from runner.source_batch import Source
from runner.text_model import TextModel, open_model
from runner.window import RowIds, WindowReader


class JobInputs:
    """A job opened: everything of it that can be refused without the weights has been.

    Attributes:
        source: the input table.
        model: the model folder's config and tokenizer.
        settings: the engine's settings as the job gives them.
        resolved: what they lead to on this machine.
        sampling: how tokens are chosen.
        wants_token_ids: whether the token ids of completions are written.
        schema: the completion columns.

    Raises:
        ConfigError, SourceError, ModelError: what is refused.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.source: Source = open_source(config.source)
        self.model: TextModel = open_model(config.model)
        self.settings = _engine_settings(config)
        self.resolved = _resolve(self.settings, self.model)
        self.sampling: Sampling = _sampling(config.sampling, self.model)
        _check_samples(config.sampling, self.resolved)
        self.builder = self._make_builder(self.resolved.limits.max_model_len)
        if self.builder.cuts_chat_end:
            say(
                "prompt.on_too_long=truncate_right cuts off the end of the chat template, which begins the answer: "
                "truncate_left keeps it, prompt.chat=never gives the bare text"
            )
        sink = config.sink
        self.wants_token_ids: bool = sink.token_ids if sink.token_ids is not None else self.model.tokenizer is None
        self._carried = [*([config.source.id_column] if config.source.id_column else []), *sink.keep_columns]
        self.schema = completion_schema(
            id_field=_field(self.source, "source.id_column", config.source.id_column),
            kept=[_field(self.source, "sink.keep_columns", name) for name in sink.keep_columns],
            token_ids=self.wants_token_ids,
            prompt=sink.keep_prompt,
        )

    @property
    def num_rows(self) -> int | None:
        """Rows after skip and limit; None where the source does not know its rows."""
        rows = self._config.source
        if self.source.num_rows is None:
            return None
        left = max(0, self.source.num_rows - rows.skip)
        return left if rows.limit is None else min(left, rows.limit)

    def limit_length(self, max_model_len: int) -> None:
        """Make the following prompts for a pool that holds no more than `max_model_len` tokens of a row."""
        if max_model_len < self.resolved.limits.max_model_len:
            say(f"engine.max_model_len is {max_model_len} tokens: all that the K/V pool holds (engine.kv_memory)")
            self.builder = self._make_builder(max_model_len, POOL_LIMIT)

    def windows(self, committed: RowIds, stopped: Callable[[], bool]) -> WindowReader:
        """The rows that are not `committed`, window by window, until `stopped`."""
        return WindowReader(
            self.source,
            self.builder,
            self.sampling,
            rows=self._config.source,
            order=self._config.order,
            carried_columns=self._carried,
            block_size=self._config.engine.block_size,
            committed=committed,
            stopped=stopped,
            samples=self._config.sampling.n,
        )

    def _make_builder(self, max_model_len: int, limited_by: str = MODEL_LIMIT) -> PromptBuilder:
        return PromptBuilder(
            self._config.prompt,
            self.source.schema,
            self.model.tokenizer,
            max_model_len=max_model_len,
            max_tokens=self._config.sampling.max_tokens,
            vocab_size=self.model.config.vocab_size,
            keep_text=self._config.sink.keep_prompt,
            limited_by=limited_by,
        )


def _engine_settings(config: RunConfig) -> EngineSettings:
    return EngineSettings(
        device=config.engine.device,
        dtype=config.model.dtype,
        dummy_weights=config.model.load == "dummy",
        block_size=config.engine.block_size,
        kv_memory=config.engine.kv_memory_bytes,
        max_seqs=config.engine.max_seqs,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_model_len=config.engine.max_model_len,
        prefix_cache=config.engine.prefix_cache,
        admission=cast(AdmissionRule, config.engine.admission),
        cuda_graphs=config.engine.cuda_graphs_wanted,
    )


def _resolve(settings: EngineSettings, model: TextModel) -> Resolved:
    try:
        return resolve(settings, model.config)
    except EngineSettingError as error:
        raise ConfigError(error.key, error.value, error.accepted) from error


def _sampling(given: SamplingSection, model: TextModel) -> Sampling:
    if given.stop and model.tokenizer is None:
        raise ConfigError("sampling.stop", given.stop, "nothing without a tokenizer: set sampling.stop_token_ids")
    special = (
        {}
        if model.tokenizer is None
        else dict(zip(model.tokenizer.all_special_tokens, model.tokenizer.all_special_ids, strict=True))
    )
    for token in special:
        if any(token in stop for stop in given.stop):
            accepted = f"sampling.stop_token_ids=[{special[token]}] for {token}: completions leave special tokens out"
            raise ConfigError("sampling.stop", given.stop, accepted)
    vocab_size = model.config.vocab_size
    if any(token_id >= vocab_size for token_id in given.stop_token_ids):
        raise ConfigError(
            "sampling.stop_token_ids", given.stop_token_ids, f"ids below {vocab_size}, the model's vocabulary"
        )
    keys = dataclasses.asdict(given) | {"stop": tuple(given.stop), "stop_token_ids": tuple(given.stop_token_ids)}
    del keys["n"]  # a request's own: it says how often, not how
    return Sampling(**keys)


def _check_samples(sampling: SamplingSection, resolved: Resolved) -> None:
    """Refuse more samples than run side by side, and tell what has no use."""
    max_seqs = resolved.limits.max_seqs
    if sampling.n > max_seqs:
        raise ConfigError(
            "sampling.n", sampling.n, f"at most engine.max_seqs={max_seqs}: the samples of a row run side by side"
        )
    if sampling.n > 1 and not sampling.temperature:
        say(f"sampling.n={sampling.n} with sampling.temperature=0 writes the same completion {sampling.n} times a row")


def _field(source: Source, key: str, name: str | None) -> Any:
    """The source's field of a column that goes through to the output."""
    if name is None:
        return None
    if not source.schema.names:  # an input without rows may not tell its columns
        return pa.field(name, pa.null())
    if name not in source.schema.names:
        raise ConfigError(key, name, f"a column of the source: {', '.join(source.schema.names)}")
    return source.schema.field(name)
