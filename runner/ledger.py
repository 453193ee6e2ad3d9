"""The committed state of one shard: what of its output counts, whatever was killed.

A file counts when a record in `_commits/` names it, and a record appears whole, in one rename, after
its files are synced. So a crash leaves at most files that no record names, which the next start
deletes. While the shard runs, each part has a record; when it is complete, one publish record takes
the place of them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from runner.fingerprint import Fingerprint
from runner.layout import ShardLayout
from runner.messages import say
from runner.part_file import read_columns
from runner.records import (
    START_OVER,
    CommitRecord,
    FileRecord,
    LedgerError,
    PublishRecord,
    RowTotals,
    read_commit,
    read_publication,
)
from runner.shard_lock import ShardLock
from runner.storage import guarded, install, make_folder, remove, sync_folder, temporary, write_json

WITHOUT_RESTART = (
    "run the same command without resume=restart to go on: with it, the rows committed so far are discarded again"
)
"""The note on every error that ends a `with Ledger(…, restart=True)` block before the shard is complete."""


class Ledger:
    """One shard of an output folder, locked against other processes until `close`.

    Args:
        out: the output folder, created if absent.
        fingerprint: what decides the output (model, prompt, sampling, input), as JSON values.
        schema: the completion columns; part of the fingerprint too, under `columns`.
        versions: of libraries; recorded, not compared.
        restart: discard the shard's output first (`resume=restart`).
        shard_index: which shard.

    Attributes:
        layout: where its files are.
        schema: the completion columns.
        attempt: the number of this attempt, from 1: one more than the highest that committed anything.

    Raises:
        ShardBusyError: another process runs the shard.
        FingerprintError: the folder holds the output of a different run.
        LedgerError: a record is unreadable, or a file it names is missing or has another size.
        StorageError: the folder cannot be read or written.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: Mapping[str, Any],
        schema: pa.Schema,
        *,
        versions: Mapping[str, str],
        restart: bool = False,
        shard_index: int = 0,
    ) -> None:
        self.layout = ShardLayout(out, shard_index)
        self.schema = schema
        self._fingerprint = Fingerprint({**fingerprint, "columns": {each.name: str(each.type) for each in schema}})
        self._commits: dict[int, CommitRecord] = {}
        self._publication: PublishRecord | None = None
        self._restarted = restart
        make_folder(self.layout.commits)
        # What is complete is only looked at, and may lie where nothing can be written.
        only_reading = not restart and self.layout.publish_record.exists()
        self._lock = ShardLock(self.layout.lock_file, only_reading=only_reading)
        try:
            with guarded(out):
                self._open(versions, restart)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._restarted and not self.is_complete:
            error.add_note(WITHOUT_RESTART)
        self.close()

    def close(self) -> None:
        """Let another process run the shard."""
        self._lock.close()

    @property
    def fingerprint_digest(self) -> str:
        """The sha256 of the fingerprint, in hexadecimal."""
        return self._fingerprint.digest

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the shard are published."""
        return self._publication is not None

    @property
    def next_part(self) -> int:
        """The number of the next part."""
        return max(self._commits, default=-1) + 1

    @property
    def totals(self) -> RowTotals:
        """Sums over the committed rows, of all attempts."""
        if self._publication is not None:
            return self._publication.totals
        return sum((record.totals for record in self._commits.values()), RowTotals())

    @property
    def completion_parts(self) -> list[Path]:
        """The committed completion files, in commit order."""
        if self._publication is not None:
            return [self.layout.completions / each.name for each in self._publication.completions]
        return [self.layout.parts / each.completions.name for each in self._commits.values() if each.completions]

    @property
    def stats_parts(self) -> list[Path]:
        """The committed statistics files, in order of attempt and step."""
        if self._publication is not None:
            return [self.layout.stats / each.name for each in self._publication.stats]
        return [self.layout.parts / each.stats.name for each in self._commits.values() if each.stats]

    def committed_rows(self) -> npt.NDArray[np.int64]:
        """The row ids that have committed output: int64, ascending, each once."""
        row_ids = [read_columns(path, ["row_id"]).column(0).to_numpy() for path in self.completion_parts]
        return np.unique(np.concatenate([np.empty(0, np.int64), *row_ids]))

    def commit(self, number: int, record: CommitRecord) -> None:
        """Make part `number` count; its files have their names and are synced."""
        write_json(self.layout.commit_record(number), dataclasses.asdict(record))
        self._commits[number] = record

    def publish(
        self, completions: Sequence[FileRecord], stats: Sequence[FileRecord], summary: Mapping[str, Any]
    ) -> None:
        """Make the shard complete: its rows and steps are in the temporaries of these files, synced.

        `summary` is JSON values. It goes into the record first and from there into its file, so that no
        kill can lose it.
        """
        record = PublishRecord(
            attempts=max((each.attempt for each in self._commits.values()), default=0),
            fingerprint=self._fingerprint.digest,
            totals=self.totals,
            completions=tuple(completions),
            stats=tuple(stats),
            summary=summary,
        )
        write_json(self.layout.publish_record, dataclasses.asdict(record))
        with guarded(self.layout.out):
            self._finish_publication(record)

    def _open(self, versions: Mapping[str, str], restart: bool) -> None:
        if restart:
            self._discard()
        self._check_run(versions)
        self._remove_temporaries(self.layout.commits)
        if self.layout.publish_record.exists():
            record = read_publication(self.layout.publish_record)
            self._check_digest(self.layout.publish_record, record.fingerprint)
            self._finish_publication(record)
            self.attempt = record.attempts + 1
            return
        make_folder(self.layout.parts)
        self._commits = self._read_commits()
        self.attempt = 1 + max((each.attempt for each in self._commits.values()), default=0)
        self._check_parts()
        self._remove_orphans()

    def _discard(self) -> None:
        """Delete the shard's output, what readers see first and the records that vouch for it after.

        Killed in between, it leaves a record without its files, which no start takes for a result, or
        files without a record; restarting goes on from either. The user is told what goes.
        """
        if self._records():
            say(f"resume=restart discards the {self._discarded_rows()} in {self.layout.out}")
        for folder in (self.layout.completions, self.layout.stats):
            _remove_all(folder, self.layout.owned_files(folder))
        _remove_all(self.layout.summary_file.parent, [self.layout.summary_file])
        _remove_all(self.layout.commits, self._records())
        _remove_all(self.layout.parts, self.layout.owned_files(self.layout.parts))
        _remove_all(self.layout.out, [self.layout.run_file])

    def _discarded_rows(self) -> str:
        """How many rows the records name, in words; they may be damaged."""
        published = self.layout.publish_record
        try:
            if published.exists():
                return f"complete output of {read_publication(published).totals.rows:,} rows"
            return f"{sum(read_commit(path).totals.rows for path in self._records()):,} committed rows"
        except LedgerError:
            return "earlier output"

    def _check_run(self, versions: Mapping[str, str]) -> None:
        """Create `run.json`, or compare with it; without it there must be no output either."""
        if self.layout.run_file.exists():
            self._fingerprint.check(self.layout.run_file)
            return
        for path in (*self._records(), *self._visible()):
            raise LedgerError(f"{self.layout.run_file} is missing although {path} is there. {START_OVER}")
        write_json(self.layout.run_file, self._fingerprint.as_json(versions))

    def _records(self) -> list[Path]:
        """The commit records and the publish record of the shard."""
        return sorted(self.layout.commits.glob(f"{self.layout.shard}*.json"))

    def _visible(self) -> list[Path]:
        """The published files of the shard."""
        folders = (self.layout.completions, self.layout.stats)
        return [path for folder in folders for path in sorted(folder.glob(f"{self.layout.shard}-*.parquet"))]

    def _read_commits(self) -> dict[int, CommitRecord]:
        """The records of committed parts by number, ascending."""
        for path in self._visible():
            raise LedgerError(f"{path} is there, but {self.layout.publish_record} is missing. {START_OVER}")
        commits = {}
        for path in self._records():
            number = path.stem.removeprefix(f"{self.layout.shard}-part-")
            if not number.isdecimal():
                raise LedgerError(f"{path} is not a record's name. {START_OVER}")
            commits[int(number)] = read_commit(path)
            self._check_digest(path, commits[int(number)].fingerprint)
        return dict(sorted(commits.items()))

    def _check_digest(self, path: Path, digest: str) -> None:
        if digest != self._fingerprint.digest:
            raise LedgerError(f"{path} belongs to a different run than {self.layout.run_file}. {START_OVER}")

    def _check_parts(self) -> None:
        """Every file that a record names must be there in its size."""
        for record in self._commits.values():
            for file in (record.completions, record.stats):
                if file is not None:
                    _check_file(self.layout.parts / file.name, file)

    def _remove_orphans(self) -> None:
        """Delete what a killed process left without a record."""
        named = {*self.completion_parts, *self.stats_parts}
        parts = self.layout.parts
        _remove_all(parts, [path for path in self.layout.owned_files(parts) if path not in named])
        for folder in (self.layout.completions, self.layout.stats):
            self._remove_temporaries(folder)

    def _remove_temporaries(self, folder: Path) -> None:
        _remove_all(folder, self.layout.temporaries(folder))

    def _finish_publication(self, record: PublishRecord) -> None:
        """Give the published files their names, write the summary and delete what they replace.

        May be repeated; where all that is done, nothing is written.
        """
        for folder, files in ((self.layout.completions, record.completions), (self.layout.stats, record.stats)):
            for file in files:
                path = folder / file.name
                if temporary(path).exists():
                    install(path)
                _check_file(path, file)
        if not self.layout.summary_file.exists():
            sync_folder(self.layout.completions)
            sync_folder(self.layout.stats)
            make_folder(self.layout.summary_file.parent)
            write_json(self.layout.summary_file, record.summary)
        _remove_all(self.layout.parts, self.layout.owned_files(self.layout.parts))
        obsolete = [path for path in self._records() if path != self.layout.publish_record]
        _remove_all(self.layout.commits, obsolete)
        self._commits = {}
        self._publication = record


def _check_file(path: Path, file: FileRecord) -> None:
    with guarded(path):
        size = path.stat().st_size if path.exists() else None
    if size != file.size:
        found = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
        raise LedgerError(f"{path} {found}. {START_OVER}")


def _remove_all(folder: Path, paths: Sequence[Path]) -> None:
    """Delete files of one folder, durably."""
    existing = [path for path in paths if path.exists()]
    for path in existing:
        remove(path)
    if existing:
        sync_folder(folder)
