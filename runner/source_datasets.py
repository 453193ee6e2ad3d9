"""Hugging Face datasets as a source: a saved folder, or what `load_dataset` finds under a name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from runner.config import ConfigError
from runner.source_batch import SourceBatch, SourceError, check_columns, rows_per_batch
from runner.source_files import FileState, FileVersion, SourceFile
from runner.source_types import cast, schema_without_views

if TYPE_CHECKING:
    from datasets import Dataset


class DatasetSource:
    """One split of a dataset, read as Arrow tables; values never pass through Python objects.

    `files` are those that hold its rows, where they are the input itself and no cache of it. One that
    changes after it was opened is refused, before the first row and again after the last.
    """

    def __init__(self, name: str, dataset: Dataset, files: Sequence[FileVersion] = ()) -> None:
        self._name = name
        self._dataset = dataset
        self._files = files
        # The features, not the files: columns may have been cast since they were written.
        self.schema: pa.Schema = schema_without_views(dataset.features.arrow_schema)
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
        self._check_files()
        for start in range(skip, stop, size):
            part = table[start : min(start + size, stop)].combine_chunks()
            arrays = [cast(part.column(field.name).combine_chunks(), field.type) for field in schema]
            yield SourceBatch(start, pa.RecordBatch.from_arrays(arrays, schema=schema))
        self._check_files()

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`. `datasets` keeps a fingerprint of the data and all changes to it.

        It is not computed again when a saved dataset is loaded, so the files count as well.
        """
        return {
            "format": "dataset",
            "path": self._name,
            "split": None if self._dataset.split is None else str(self._dataset.split),
            "rows": self.num_rows,
            "fingerprint": self._dataset._fingerprint,
            "files": [
                {"name": Path(each.file.path).name, "size": each.state.size, **each.content} for each in self._files
            ],
        }

    def _check_files(self) -> None:
        for each in self._files:
            if each.state.mark is not None:  # a fetched copy belongs to this process alone
                each.check()


def open_saved_dataset(path: str, split: str | None) -> DatasetSource:
    """The folder or URL of a dataset, or a split of a dataset dictionary, written by `save_to_disk`.

    Raises:
        SourceError: the folder cannot be read.
        ConfigError: the split is not set where there are several, or does not exist.
    """
    is_local = isinstance(fsspec.core.url_to_fs(path)[0], LocalFileSystem)
    splits = _read_record(path, "dataset_dict.json", optional=True)
    try:
        if splits is None:
            dataset = _load(path)
            if split is not None and str(dataset.split) != split:
                accepted = f"null, or the split of this saved dataset: {dataset.split}"
                raise ConfigError("source.split", split, accepted)
        else:
            dataset = _load(_inside(path, _choose_split(splits["splits"], split)))
        files = [_version(each["filename"], is_local) for each in dataset.cache_files]
    # The records in the folder may be damaged in any way, and `datasets` does not check them.
    except (OSError, LookupError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise SourceError(
            f"source.path {path!r}: not a readable saved dataset: {type(error).__name__}: {error}"
        ) from error
    return DatasetSource(path, dataset, files)


def _load(path: str) -> Dataset:
    """One saved dataset. `datasets` cannot load one without rows, which it saves without a data file."""
    # Importing `datasets` takes seconds that a job on files need not wait.
    from datasets import Dataset, DatasetInfo, load_from_disk
    from datasets.table import InMemoryTable

    state = _read_record(path, "state.json")
    assert state is not None
    if state["_data_files"]:
        return load_from_disk(path)
    info = DatasetInfo.from_dict(_read_record(path, "dataset_info.json"))
    rows = InMemoryTable(info.features.arrow_schema.empty_table())
    return Dataset(rows, info=info, split=state["_split"], fingerprint=state["_fingerprint"])


def _inside(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def _read_record(path: str, name: str, *, optional: bool = False) -> dict[str, Any] | None:
    """A JSON file of a saved dataset, None where it may be absent and is."""
    filesystem, inside = fsspec.core.url_to_fs(_inside(path, name))
    if optional and not filesystem.exists(inside):
        return None
    try:
        record = json.loads(filesystem.cat_file(inside))
    except (OSError, ValueError) as error:
        raise SourceError(f"{_inside(path, name)}: not a readable record of a saved dataset: {error}") from error
    if not isinstance(record, dict):
        raise SourceError(f"{_inside(path, name)}: not a readable record of a saved dataset: no object")
    return record


def _version(path: str, is_local: bool) -> FileVersion:
    """A data file. Of one that was fetched from elsewhere, the time of its fetching says nothing."""
    file = SourceFile(LocalFileSystem(), path, Path(path).stat().st_size)
    if is_local:
        return FileVersion.of(file)
    state = FileState(file.size, None)
    return FileVersion(file, state, file.content_key(state))


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
    return DatasetSource(path, found[_choose_split(found, split)])


def _choose_split(found: Iterable[str], split: str | None) -> str:
    """The split that is asked for, or the only one."""
    names = list(found)
    if split is None and len(names) == 1:
        return names[0]
    if split is None or split not in names:
        raise ConfigError("source.split", split, f"one of the splits of this dataset: {', '.join(names)}")
    return split
