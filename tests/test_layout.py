"""Names in the output folder."""

from __future__ import annotations

from pathlib import Path

from runner.layout import ShardLayout
from runner.storage import temporary


def files_of(layout: ShardLayout) -> list[Path]:
    """Every file that belongs to the shard alone, of part 3."""
    return [
        layout.summary_file,
        layout.lock_file,
        layout.publish_record,
        layout.commit_record(3),
        layout.part(3),
        layout.stats_part(3),
        layout.merge_run(3),
        layout.published(layout.completions, 3),
        layout.published(layout.stats, 3),
    ]


def test_no_two_files_of_any_shards_share_a_path() -> None:
    paths = [path for shard in (0, 1, 11, 100_000) for path in files_of(ShardLayout(Path("out"), shard))]
    assert len({*paths}) == len(paths)


def test_names_sort_in_number_order() -> None:
    # trap 48
    numbers = [0, 1, 2, 9, 10, 11, 99, 100, 12_345]
    layout = ShardLayout(Path("out"))
    for name in (layout.part, layout.stats_part, layout.commit_record, layout.merge_run):
        paths = [name(number) for number in numbers]
        assert sorted(paths) == paths
    shards = [ShardLayout(Path("out"), number).publish_record for number in numbers]
    assert sorted(shards) == shards


def test_readers_see_published_files_and_nothing_of_the_work() -> None:
    # trap 48
    layout = ShardLayout(Path("out"))
    assert {folder.name[0] for folder in (layout.parts, layout.commits)} == {"_"}
    for folder in (layout.completions, layout.stats):
        assert not folder.name.startswith(("_", "."))
        assert temporary(layout.published(folder, 0)).name.startswith(".")


def test_what_a_shard_left_half_written_is_found_whatever_it_was_to_become(tmp_path: Path) -> None:
    layout = ShardLayout(tmp_path, 1)
    for path in files_of(layout):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary(path).touch()
        path.touch()
        assert temporary(path) in layout.temporaries(path.parent)
        assert path not in layout.temporaries(path.parent)


def test_a_shard_owns_its_data_and_its_temporaries_and_nothing_of_others(tmp_path: Path) -> None:
    layout = ShardLayout(tmp_path, 1)
    layout.parts.mkdir()
    mine = [layout.part(0), layout.part(12), layout.stats_part(0), temporary(layout.part(13))]
    others = [ShardLayout(tmp_path, shard).part(0) for shard in (0, 2, 10, 11)]
    others += [temporary(path) for path in others] + [layout.parts / "shard-00001.txt", layout.parts / "notes.parquet"]
    for path in mine + others:
        path.touch()
    assert layout.owned_files(layout.parts) == sorted(mine)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    layout = ShardLayout(tmp_path / "nothing")
    assert layout.owned_files(layout.parts) == layout.temporaries(layout.completions) == []
