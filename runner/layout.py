"""Names of everything in the output folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ShardLayout:
    """Where one shard keeps its files in the output folder `out`.

    Numbers are padded to five digits, so names sort in number order. Folders that are not results
    begin with `_` and files that are being written with `.`, which readers of data folders skip.
    """

    out: Path
    shard_index: int = 0

    @property
    def shard(self) -> str:
        """The stem of every name of this shard."""
        return f"shard-{self.shard_index:05d}"

    @property
    def completions(self) -> Path:
        """The folder of published completions."""
        return self.out / "completions"

    @property
    def stats(self) -> Path:
        """The folder of published step statistics."""
        return self.out / "stats"

    @property
    def parts(self) -> Path:
        """The folder of committed, not yet published parts."""
        return self.out / "_parts"

    @property
    def commits(self) -> Path:
        """The folder of commit records."""
        return self.out / "_commits"

    @property
    def run_file(self) -> Path:
        """The fingerprint of the run."""
        return self.out / "run.json"

    @property
    def summary_file(self) -> Path:
        """What the shard did."""
        return self.out / "summary" / f"{self.shard}.json"

    @property
    def lock_file(self) -> Path:
        """The file whose lock says that a process runs the shard."""
        return self.commits / f"{self.shard}.lock"

    @property
    def publish_record(self) -> Path:
        """The record whose presence makes the shard complete."""
        return self.commits / f"{self.shard}.json"

    def commit_record(self, number: int) -> Path:
        """The record whose presence commits the rows of part `number`."""
        return self.commits / f"{self.shard}-part-{number:05d}.json"

    def part(self, number: int) -> Path:
        """Committed completions."""
        return self.parts / f"{self.shard}-part-{number:05d}.parquet"

    def stats_part(self, number: int) -> Path:
        """Committed step statistics."""
        return self.parts / f"{self.shard}-stats-{number:05d}.parquet"

    def merge_run(self, number: int) -> Path:
        """Parts merged into one on the way to publishing; only its temporary ever exists."""
        return self.parts / f"{self.shard}-run-{number:05d}.parquet"

    def published(self, folder: Path, number: int) -> Path:
        """File `number` of `completions` or `stats`."""
        return folder / f"{self.shard}-part-{number:05d}.parquet"

    def owned_files(self, folder: Path) -> list[Path]:
        """The Parquet files of this shard in a folder, and their temporaries, in name order."""
        shown = folder.glob(f"{self.shard}-*.parquet")
        return sorted([*shown, *self.temporaries(folder)])

    def temporaries(self, folder: Path) -> list[Path]:
        """What this shard left half-written in a folder."""
        return sorted(folder.glob(f".{self.shard}[-.]*"))
