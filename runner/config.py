"""The configuration of a job: its keys, their types and their defaults.

The dataclasses are the schema (an OmegaConf structured config) and the only source of the defaults;
`runner.validation` turns what Hydra composed into them.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from omegaconf import MISSING

from runner.units import CommitEvery, parse_commit_every, parse_size


class ConfigError(Exception):
    """A configuration that cannot run: exit code 2.

    `key` is the dotted key, `value` what was given, `accepted` what would be accepted.
    """

    def __init__(self, key: str, value: object, accepted: str) -> None:
        self.key = key
        self.value = value
        self.accepted = accepted
        shown = "not set" if value is None else repr(value)
        super().__init__(f"{key}: {shown}; accepted: {accepted}")


def choice(default: str, *others: str) -> Any:
    """A text field that accepts only `default` and `others`."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass(frozen=True)
class SourceConfig:
    """The input table. `row_id` counts its rows before `skip` and `limit`."""

    path: str = MISSING
    format: str = choice("auto", "parquet", "jsonl", "dataset")
    split: str | None = None
    id_column: str | None = None
    limit: int | None = None
    skip: int = 0


@dataclass(frozen=True)
class PromptConfig:
    """How a row becomes a prompt: exactly one of the first five keys is set."""

    column: str | None = None
    template: str | None = None
    template_file: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    system: str | None = None
    chat: str = choice("auto", "always", "never")
    chat_kwargs: dict[str, Any] = field(default_factory=dict)
    on_too_long: str = choice("error", "truncate_left", "truncate_right")
    special_tokens: bool = False


@dataclass(frozen=True)
class ModelSection:
    """The model and its tokenizer."""

    path: str = MISSING
    tokenizer: str | None = None
    dtype: str = choice("auto", "float32", "bfloat16", "float16")
    trust_remote_code: bool = False
    load: str = choice("auto", "dummy")


@dataclass(frozen=True)
class EngineSection:
    """The device, the K/V block pool and the size of a step. An unset limit is chosen by the engine."""

    device: str = "auto"
    block_size: int = 16
    kv_memory: str = "auto"
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    max_model_len: int | None = None
    prefix_cache: bool = True
    admission: str = choice("planned", "greedy", "reserve")
    cuda_graphs: str = choice("auto", "true", "false")

    @property
    def kv_memory_bytes(self) -> int | None:
        """The pool size in bytes, None where the engine chooses it."""
        return None if self.kv_memory == "auto" else parse_size(self.kv_memory)

    @property
    def cuda_graphs_wanted(self) -> bool | None:
        """Whether steps run from CUDA graphs, None where the engine chooses."""
        return None if self.cuda_graphs == "auto" else self.cuda_graphs == "true"


@dataclass(frozen=True)
class SamplingSection:
    """How tokens are chosen and when a row ends, in the words of `engine.request.Sampling`; `n` completions a row."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1


@dataclass(frozen=True)
class OrderConfig:
    """The order in which rows enter the engine, and whether to advise on that of a template's columns."""

    by: str = choice("prefix", "input", "longest")
    window: str = "2GiB"
    columns: str | None = field(default=None, metadata={"choices": ("auto",)})

    @property
    def window_bytes(self) -> int:
        """The size of a window's token ids in bytes."""
        return parse_size(self.window)


@dataclass(frozen=True)
class SinkConfig:
    """The output folder and the shape of its files."""

    path: str = MISSING
    rows_per_part: int = 100_000
    commit_every: str = "60s"
    compression: str = choice("zstd", "snappy", "gzip", "lz4", "none")
    keep_columns: list[str] = field(default_factory=list)
    token_ids: bool | None = None
    keep_prompt: bool = False
    order: str = choice("input", "completion")

    @property
    def commit_interval(self) -> CommitEvery:
        """`commit_every`, parsed."""
        return parse_commit_every(self.commit_every)


@dataclass(frozen=True)
class RunConfig:
    """A whole job."""

    mode: str = choice("run", "plan")
    resume: str = choice("auto", "restart")
    source: SourceConfig = field(default_factory=SourceConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    order: OrderConfig = field(default_factory=OrderConfig)
    sink: SinkConfig = field(default_factory=SinkConfig)


SECTIONS: dict[str, type[Any]] = {
    name: hint
    for name, hint in get_type_hints(RunConfig).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}


def keys() -> dict[str, dataclasses.Field[Any]]:
    """Every key of the schema by its dotted name."""
    found = {each.name: each for each in dataclasses.fields(RunConfig) if each.name not in SECTIONS}
    for section, kind in SECTIONS.items():
        found |= {f"{section}.{each.name}": each for each in dataclasses.fields(kind)}
    return found


def unknown_key(key: str, value: object) -> ConfigError:
    """The refusal of a key that is not in the schema, naming those that are."""
    section = key.split(".")[0]
    inside = [each for each in keys() if each.startswith(f"{section}.")]
    known = inside or [each.name for each in dataclasses.fields(RunConfig)]
    near = difflib.get_close_matches(key, [*keys(), *SECTIONS], n=1)
    hint = f"{near[0]} perhaps; " if near else ""
    return ConfigError(key, value, f"{hint}the keys are {', '.join(known)}")
