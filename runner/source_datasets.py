"""Hugging Face datasets as a source: a saved folder, or what `load_dataset` finds under a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from runner.config import ConfigError
from runner.source_batch import SourceBatch, SourceError, check_columns, rows_per_batch

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


class DatasetSource:
    """One split of a dataset, read as Arrow tables; values never pass through Python objects."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self._name = name
        self._dataset = dataset
        # The features, not the files: columns may have been cast since they were written.
        self.schema: pa.Schema = dataset.features.arrow_schema.remove_metadata()
        self.num_rows: int | None = len(dataset)

    def batches(self, columns: Sequence[str], skip: int, limit: int | None) -> Iterator[SourceBatch]:
        """See `Source.batches`."""
        check_columns(columns, self.schema, self._name)
        names = list(dict.fromkeys(columns))
        table = self._dataset.select_columns(names).with_format("arrow")
        rows = len(table)
        stop = rows if limit is None else min(rows, skip + limit)
        size = rows_per_batch(self._dataset.data.nbytes / max(self._dataset.data.num_rows, 1))
        schema = pa.schema([self.schema.field(name) for name in names])
        for start in range(skip, stop, size):
            part = table[start : min(start + size, stop)].combine_chunks()
            arrays = [part.column(name).combine_chunks() for name in names]
            yield SourceBatch(start, pa.RecordBatch.from_arrays(arrays, schema=schema))

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`. `datasets` derives its fingerprint from the data and all changes to it."""
        return {
            "format": "dataset",
            "path": self._name,
            "split": None if self._dataset.split is None else str(self._dataset.split),
            "rows": self.num_rows,
            "fingerprint": self._dataset._fingerprint,
        }


def open_saved_dataset(path: str, split: str | None) -> DatasetSource:
    """The folder or URL of a dataset, or a split of a dataset dictionary, written by `save_to_disk`.

    Raises:
        SourceError: the folder cannot be read.
        ConfigError: the split is not set where there are several, or does not exist.
    """
    # Importing `datasets` takes seconds that a job on files need not wait.
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SourceError(f"source.path {path!r}: not a readable saved dataset: {error}") from error
    if isinstance(found, DatasetDict):
        return DatasetSource(path, _choose_split(found, split))
    if split is not None and str(found.split) != split:
        raise ConfigError("source.split", split, f"null, or the split of this saved dataset: {found.split}")
    return DatasetSource(path, found)


def open_named_dataset(path: str, split: str | None) -> DatasetSource:
    """A dataset through `datasets.load_dataset`: a name, a local folder, or `hf://[datasets/]NAME[@REVISION]`.

    Raises:
        SourceError: there is none; the message says what was tried.
        ConfigError: the split is not set or does not exist.
    """
    from datasets import load_dataset

    name, _, revision = path.removeprefix("hf://").removeprefix("datasets/").partition("@")
    try:
        found = load_dataset(name, revision=revision or None)
    # Loading runs whatever reader the files need, and each has its own errors.
    except Exception as error:
        raise SourceError(
            f"source.path {path!r} is not an existing file or folder, and datasets.load_dataset({name!r}) "
            f"failed: {type(error).__name__}: {error}"
        ) from error
    return DatasetSource(path, _choose_split(found, split))


def _choose_split(found: DatasetDict, split: str | None) -> Dataset:
    if split is None or split not in found:
        raise ConfigError("source.split", split, f"one of the splits of this dataset: {', '.join(map(str, found))}")
    return found[split]
