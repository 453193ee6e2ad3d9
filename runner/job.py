"""One job, start to end: open everything, run the rows through the engine, publish."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.memory_plan import OutOfMemoryError
from engine.startup import EngineSettingError, Started, start
from runner.column_order import advise_columns
from runner.config import ConfigError, RunConfig
from runner.interrupts import stoppable
from runner.job_inputs import JobInputs
from runner.ledger import Ledger
from runner.messages import say
from runner.model_identity import model_identity
from runner.publish import publish
from runner.records import RowTotals
from runner.row_flow import RowFlow
from runner.sink import Sink
from runner.source_batch import SourceError
from runner.summary import GENERATE, Summary, render_summary
from runner.window import ReadAhead

COMPLETE, COMPLETE_WITH_ERRORS = 0, 3
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "pyarrow", "numpy")


def run(config: RunConfig) -> int:
    """Run a job, or what is left of it; the exit code, 0 or 3.

    Raises ConfigError, SourceError, ModelError, FingerprintError and LedgerError for what is refused,
    ShardBusyError, StorageError, and Interrupted once what was finished is committed.
    """
    return _Job(config).run()


class _Job:
    """The steps of a job, from its inputs to its end."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        with self._phase("open"):
            self._inputs = JobInputs(config)

    def run(self) -> int:
        config = self._config
        out = Path(config.sink.path)
        fingerprint = _fingerprint(config, self._inputs)
        restart = config.resume == "restart"
        with Ledger(out, fingerprint, self._inputs.schema, versions=_versions(), restart=restart) as ledger:
            if ledger.is_complete:
                say(f"{out} is complete: {_rows_text(ledger.totals)}")
                return _exit_code(ledger.totals)
            summary = self._run_rows(ledger)
            say(f"{out} is complete\n{render_summary(summary)}")
            return _exit_code(ledger.totals)

    def _run_rows(self, ledger: Ledger) -> Summary:
        config, inputs = self._config, self._inputs
        committed, before = ledger.committed_rows(), ledger.totals
        rows_total = inputs.num_rows
        if rows_total == 0:
            rows = inputs.source.num_rows
            say(f"no rows to run: source.path has {rows:,}, of which {_selection(config)} leaves none")
        if len(committed):
            say(f"resuming: {len(committed):,} rows of earlier attempts are committed")
        if config.order.columns is not None:
            with self._phase("advise"):
                say(f"order.columns: {advise_columns(config, inputs)}")
        with self._phase("load"):
            started = self._start()
        say(f"memory plan: {started.memory_plan}")
        inputs.limit_length(started.engine.limits.max_model_len)
        rows_left = None if rows_total is None else rows_total - len(committed)
        samples = config.sampling.n
        with self._phase(GENERATE), Sink(ledger, config.sink, samples=samples) as sink, stoppable() as stop:
            flow = RowFlow(
                started.engine, inputs.model, sink, config, inputs.wants_token_ids, rows_before=len(committed)
            )
            with ReadAhead(inputs.windows(committed, lambda: bool(stop))) as windows:
                flow.run(windows, rows_left, stop)
        rows_found = len(committed) + flow.rows_done
        if rows_total is not None and rows_found != rows_total:
            raise SourceError(
                f"{config.source.path} gave {rows_found} rows, and had {rows_total} when the job began: "
                "an input must not change while it is read; put it back, or start over with resume=restart"
            )
        summary = self._summary(ledger.totals, ledger.totals - before, flow, started)
        return publish(ledger, config.sink, expected_rows=rows_found * samples, summary=summary)

    def _start(self) -> Started:
        inputs, model = self._inputs, self._inputs.model
        try:
            return start(
                model.folder,
                model.config,
                inputs.settings,
                inputs.resolved,
                inputs.sampling,
                end_token_ids=model.end_token_ids,
                vocab_limit=model.vocab_limit,
                decode=model.decode if model.tokenizer is not None else None,
                notify=say,
            )
        except EngineSettingError as error:
            raise ConfigError(error.key, error.value, error.accepted) from error
        except OutOfMemoryError as error:
            raise ConfigError("engine.kv_memory", self._config.engine.kv_memory, str(error)) from error

    def _summary(self, rows: RowTotals, attempt: RowTotals, flow: RowFlow, started: Started) -> Summary:
        """Rows and their tokens of the whole shard; prefix reuse, steps and seconds of this attempt."""
        steps, plan = flow.totals, dataclasses.asdict(started.memory_plan)
        del plan["num_blocks"], plan["graph_tokens"]  # These are no bytes.
        return Summary(
            rows=rows.rows,
            completions=rows.completions,
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
            inflight_hit_rate=steps.inflight_hit_rate,
            missed_hit_tokens=max(0, flow.highest_hit_tokens - steps.cached_tokens),
            steps=steps.steps,
            mean_live_fraction=steps.mean_live_fraction,
            rows_waited=steps.rows_waited,
            occupancy=steps.occupancy,
            waiting_occupancy=steps.waiting_occupancy,
            slack_fraction=steps.slack_fraction(self._config.engine.block_size),
            shared_blocks=steps.shared_blocks,
            shared_fraction=steps.shared_fraction,
            duplicate_blocks=steps.duplicate_blocks,
            copied_blocks=steps.copied_blocks,
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


def _selection(config: RunConfig) -> str:
    limit = "" if config.source.limit is None else f", source.limit={config.source.limit:,}"
    return f"source.skip={config.source.skip:,}{limit}"


def _fingerprint(config: RunConfig, inputs: JobInputs) -> dict[str, Any]:
    """Everything that decides what the output holds, as JSON values."""
    tokenizer: Any = config.model.tokenizer
    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = model_identity(Path(tokenizer))
    prompt = dataclasses.asdict(config.prompt)
    if config.prompt.template_file is not None:
        prompt["template_file"] = Path(config.prompt.template_file).read_text(encoding="utf-8")
    return {
        "model": {
            "files": model_identity(inputs.model.folder),
            "tokenizer": tokenizer,
            "dtype": str(inputs.resolved.dtype).removeprefix("torch."),
            "load": config.model.load,
            "max_model_len": config.engine.max_model_len,
        },
        "prompt": prompt,
        "sampling": dataclasses.asdict(config.sampling),
        "source": inputs.source.fingerprint() | {"skip": config.source.skip, "limit": config.source.limit},
        "id_column": config.source.id_column,
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}
