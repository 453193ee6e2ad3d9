"""One job, start to end: open everything, run the rows through the engine, publish."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.memory_plan import OutOfMemoryError
from engine.request import Sampling
from engine.startup import EngineSettingError, EngineSettings, Resolved, Started, resolve, start
from runner.config import ConfigError, RunConfig
from runner.interrupts import stoppable
from runner.ledger import Ledger
from runner.messages import say
from runner.model_identity import model_identity
from runner.output_schema import completion_schema
from runner.prompt import MODEL_LIMIT, POOL_LIMIT, PromptBuilder
from runner.publish import publish
from runner.records import RowTotals
from runner.row_flow import RowFlow
from runner.sink import Sink
from runner.source import open_source
from runner.source_batch import Source, SourceError
from runner.summary import GENERATE, Summary, render_summary
from runner.text_model import TextModel, open_model
from runner.window import ReadAhead, RowIds, WindowReader

COMPLETE, COMPLETE_WITH_ERRORS = 0, 3
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "pyarrow", "numpy")


def run(config: RunConfig) -> int:
    """Run a job, or what is left of it; the exit code, 0 or 3.

    Raises ConfigError, SourceError, ModelError, FingerprintError and LedgerError for what is refused,
    ShardBusyError, StorageError, and Interrupted once what was finished is committed.
    """
    return _Job(config).run()


class _Job:
    """The parts of a job that are known before any weight is read, and the steps that lead to its end."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        with self._phase("open"):
            self._source = open_source(config.source)
            self._model = open_model(config.model)
            self._settings = _engine_settings(config)
            self._resolved = _resolve(self._settings, self._model)
            self._sampling = _sampling(config, self._model)
            self._builder = self._make_builder(self._resolved.limits.max_model_len)
            if self._builder.cuts_chat_end:
                say(
                    "prompt.on_too_long=truncate_right cuts off the end of the chat template, which begins the answer: "
                    "truncate_left keeps it, prompt.chat=never gives the bare text"
                )
            self._wants_token_ids = (
                config.sink.token_ids if config.sink.token_ids is not None else self._model.tokenizer is None
            )
            self._carried = [*([config.source.id_column] if config.source.id_column else []), *config.sink.keep_columns]
            self._schema = completion_schema(
                id_field=_field(self._source, "source.id_column", config.source.id_column),
                kept=[_field(self._source, "sink.keep_columns", name) for name in config.sink.keep_columns],
                token_ids=self._wants_token_ids,
                prompt=config.sink.keep_prompt,
            )

    def run(self) -> int:
        config = self._config
        out = Path(config.sink.path)
        fingerprint = _fingerprint(config, self._source, self._model, self._resolved)
        restart = config.resume == "restart"
        with Ledger(out, fingerprint, self._schema, versions=_versions(), restart=restart) as ledger:
            if ledger.is_complete:
                say(f"{out} is complete: {_rows_text(ledger.totals)}")
                return _exit_code(ledger.totals)
            summary = self._run_rows(ledger)
            say(f"{out} is complete\n{render_summary(summary)}")
            return _exit_code(ledger.totals)

    def _run_rows(self, ledger: Ledger) -> Summary:
        config, committed, before = self._config, ledger.committed_rows(), ledger.totals
        rows_total = _rows_in_job(self._source, config)
        if rows_total == 0:
            say(f"no rows to run: source.path has {self._source.num_rows:,}, of which {_selection(config)} leaves none")
        if len(committed):
            say(f"resuming: {len(committed):,} rows of earlier attempts are committed")
        with self._phase("load"):
            started = self._start()
        say(f"memory plan: {started.memory_plan}")
        limit = started.engine.limits.max_model_len
        if limit < self._resolved.limits.max_model_len:
            say(f"engine.max_model_len is {limit} tokens: all that the K/V pool holds (engine.kv_memory)")
            self._builder = self._make_builder(limit, POOL_LIMIT)
        rows_left = None if rows_total is None else rows_total - len(committed)
        with self._phase(GENERATE), Sink(ledger, config.sink) as sink, stoppable() as stop:
            flow = RowFlow(started.engine, self._model, sink, config, self._wants_token_ids, rows_before=len(committed))
            with ReadAhead(self._windows(committed, lambda: bool(stop))) as windows:
                flow.run(windows, rows_left, stop)
        rows_found = len(committed) + flow.rows_done
        if rows_total is not None and rows_found != rows_total:
            raise SourceError(
                f"{config.source.path} gave {rows_found} rows, and had {rows_total} when the job began: "
                "an input must not change while it is read; put it back, or start over with resume=restart"
            )
        summary = self._summary(ledger.totals, ledger.totals - before, flow, started)
        return publish(ledger, config.sink, expected_rows=rows_found, summary=summary)

    def _windows(self, committed: RowIds, stopped: Callable[[], bool]) -> WindowReader:
        return WindowReader(
            self._source,
            self._builder,
            self._sampling,
            rows=self._config.source,
            order=self._config.order,
            carried_columns=self._carried,
            block_size=self._config.engine.block_size,
            committed=committed,
            stopped=stopped,
        )

    def _start(self) -> Started:
        model = self._model
        try:
            return start(
                model.folder,
                model.config,
                self._settings,
                self._resolved,
                self._sampling,
                end_token_ids=model.end_token_ids,
                vocab_limit=model.vocab_limit,
                decode=model.decode if model.tokenizer is not None else None,
            )
        except EngineSettingError as error:
            raise ConfigError(error.key, error.value, error.accepted) from error
        except OutOfMemoryError as error:
            raise ConfigError("engine.kv_memory", self._config.engine.kv_memory, str(error)) from error

    def _make_builder(self, max_model_len: int, limited_by: str = MODEL_LIMIT) -> PromptBuilder:
        return PromptBuilder(
            self._config.prompt,
            self._source.schema,
            self._model.tokenizer,
            max_model_len=max_model_len,
            max_tokens=self._config.sampling.max_tokens,
            vocab_size=self._model.config.vocab_size,
            keep_text=self._config.sink.keep_prompt,
            limited_by=limited_by,
        )

    def _summary(self, rows: RowTotals, attempt: RowTotals, flow: RowFlow, started: Started) -> Summary:
        """Rows and their tokens of the whole shard; prefix reuse, steps and seconds of this attempt."""
        steps, plan = flow.totals, dataclasses.asdict(started.memory_plan)
        del plan["num_blocks"], plan["graph_tokens"]  # These are no bytes.
        return Summary(
            rows=rows.rows,
            errors=rows.errors,
            prompt_tokens=rows.prompt_tokens,
            cached_tokens=rows.cached_tokens,
            recomputed_tokens=steps.recomputed_tokens,
            output_tokens=rows.output_tokens,
            attempt_rows=attempt.rows,
            attempt_prompt_tokens=attempt.prompt_tokens,
            attempt_output_tokens=attempt.output_tokens,
            highest_hit_rate=flow.highest_hit_rate,
            hit_rate=steps.hit_rate,
            steps=steps.steps,
            mean_live_fraction=steps.mean_live_fraction,
            rows_waited=steps.rows_waited,
            preemptions=steps.preemptions,
            evictions=steps.evictions,
            memory_plan=plan,
            peak_bytes=started.peak_bytes(),
            seconds=self._seconds,
            versions=_versions(),
            device=started.device_name,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = round(time.perf_counter() - began, 3)


def _rows_text(totals: RowTotals) -> str:
    """The rows of an output that is complete, and how to run them again where that has a use."""
    remedy = "; resume=restart discards them all and runs them again" if totals.errors else ""
    return f"{totals.rows:,} rows, {totals.errors:,} with an error{remedy}"


def _exit_code(totals: RowTotals) -> int:
    return COMPLETE_WITH_ERRORS if totals.errors else COMPLETE


def _rows_in_job(source: Source, config: RunConfig) -> int | None:
    """Rows after skip and limit; None where the source does not know its rows."""
    if source.num_rows is None:
        return None
    left = max(0, source.num_rows - config.source.skip)
    return left if config.source.limit is None else min(left, config.source.limit)


def _selection(config: RunConfig) -> str:
    limit = "" if config.source.limit is None else f", source.limit={config.source.limit:,}"
    return f"source.skip={config.source.skip:,}{limit}"


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
        cuda_graphs=config.engine.cuda_graphs_wanted,
    )


def _resolve(settings: EngineSettings, model: TextModel) -> Resolved:
    try:
        return resolve(settings, model.config)
    except EngineSettingError as error:
        raise ConfigError(error.key, error.value, error.accepted) from error


def _sampling(config: RunConfig, model: TextModel) -> Sampling:
    given = config.sampling
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
    return Sampling(
        **dataclasses.asdict(given) | {"stop": tuple(given.stop), "stop_token_ids": tuple(given.stop_token_ids)}
    )


def _field(source: Source, key: str, name: str | None) -> Any:
    """The source's field of a column that goes through to the output."""
    if name is None:
        return None
    if not source.schema.names:  # an input without rows may not tell its columns
        return pa.field(name, pa.null())
    if name not in source.schema.names:
        raise ConfigError(key, name, f"a column of the source: {', '.join(source.schema.names)}")
    return source.schema.field(name)


def _fingerprint(config: RunConfig, source: Source, model: TextModel, resolved: Resolved) -> dict[str, Any]:
    """Everything that decides what the output holds, as JSON values."""
    tokenizer: Any = config.model.tokenizer
    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = model_identity(Path(tokenizer))
    prompt = dataclasses.asdict(config.prompt)
    if config.prompt.template_file is not None:
        prompt["template_file"] = Path(config.prompt.template_file).read_text(encoding="utf-8")
    return {
        "model": {
            "files": model_identity(model.folder),
            "tokenizer": tokenizer,
            "dtype": str(resolved.dtype).removeprefix("torch."),
            "load": config.model.load,
            "max_model_len": config.engine.max_model_len,
        },
        "prompt": prompt,
        "sampling": dataclasses.asdict(config.sampling),
        "source": source.fingerprint() | {"skip": config.source.skip, "limit": config.source.limit},
        "id_column": config.source.id_column,
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}
