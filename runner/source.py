"""The input table of a job: opens what `source.path` names as a stream of record batches."""

from __future__ import annotations

import re
from pathlib import Path

from runner.config import ConfigError, SourceConfig
from runner.messages import say
from runner.source_batch import Source, SourceBatch, SourceError
from runner.source_datasets import DatasetSource, open_named_dataset, open_saved_dataset
from runner.source_files import COMPRESSED, Place, PlaceKind, format_of, locate
from runner.source_jsonl import JsonlSource
from runner.source_parquet import ParquetSource

__all__ = ["Source", "SourceBatch", "SourceError", "open_source"]

_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Of files that are no source either, but no name of a dataset has such an end.
_FILE_SUFFIXES = {".csv", ".tsv", ".txt", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".zip", ".zst", *COMPRESSED}


def open_source(config: SourceConfig) -> Source:
    """Open the input of a job: Parquet files, JSON-lines files or a dataset.

    Raises:
        SourceError: nothing there, or it cannot be read.
        ConfigError: a key that does not go together with what is there.
    """
    source = _open_dataset(config) or _open_files(config)
    if config.id_column is not None and source.schema.names and config.id_column not in source.schema.names:
        raise ConfigError("source.id_column", config.id_column, f"a column of the source: {_listed(source)}")
    return source


def _open_dataset(config: SourceConfig) -> DatasetSource | None:
    """The dataset that the path names, None where it names files."""
    if config.format not in ("auto", "dataset"):
        return None
    if _names_hub_dataset(config.path):
        return open_named_dataset(config.path, config.split)
    place = locate(config.path)
    if place.is_saved_dataset:
        return open_saved_dataset(config.path, config.split)
    if config.format == "dataset" or _may_be_dataset_name(place):
        if place.kind is PlaceKind.MISSING:
            say(f"source.path {config.path!r} is no file or folder: looking for a dataset of that name on the Hub")
        return open_named_dataset(config.path, config.split)
    return None


def _open_files(config: SourceConfig) -> Source:
    if config.split is not None:
        raise ConfigError("source.split", config.split, "null with files; only a dataset has splits")
    file_format, files = locate(config.path).files(config.format)
    return ParquetSource(files) if file_format == "parquet" else JsonlSource(files)


def _names_hub_dataset(path: str) -> bool:
    """Whether an `hf://` path names a whole dataset; one that names files in it is read like any URL."""
    return path.startswith("hf://") and format_of(path) is None and "*" not in path


def _may_be_dataset_name(place: Place) -> bool:
    """Whether nothing is there, and nothing says that a file was meant: its suffix, or a folder that exists."""
    path = Path(place.given)
    if place.kind is not PlaceKind.MISSING or _DATASET_NAME.fullmatch(place.given) is None:
        return False
    is_file_name = format_of(place.given) is not None or path.suffix.lower() in _FILE_SUFFIXES
    return not is_file_name and not (len(path.parts) > 1 and Path(path.parts[0]).exists())


def _listed(source: Source) -> str:
    return ", ".join(source.schema.names)
