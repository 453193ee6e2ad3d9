from pathlib import Path

import pyarrow.json
import pyarrow.parquet as pq
import pytest

from runner.compose import compose_job
from runner.config import ConfigError
from runner.jobs import PACKAGED, find_job, list_jobs, take_job
from runner.validation import validate


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def add_job(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.touch()
    return path


def test_the_job_is_taken_out_of_the_arguments() -> None:
    assert take_job(["sink.path=a", "job=demo", "order.by=input"]) == ("demo", ["sink.path=a", "order.by=input"])
    assert take_job([]) == (None, [])


@pytest.mark.parametrize("arguments", [["job=a", "job=b"], ["job="]])
def test_two_jobs_or_an_empty_one_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="one name or path"):
        take_job(arguments)


def test_packaged_jobs_are_found_from_any_folder(empty_folder: Path) -> None:
    assert find_job("demo", None).path == PACKAGED / "demo.yaml"


def test_the_first_folder_that_has_the_name_wins(empty_folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    here = add_job(empty_folder / "jobs", "demo")
    assert find_job("demo", None).path == here
    in_jobs = add_job(given / "jobs", "demo")
    assert find_job("demo", given).path == in_jobs
    direct = add_job(given, "demo")
    assert find_job("demo", given).path == direct
    assert [job.path for job in list_jobs(given) if job.name == "demo"] == [direct]


def test_a_path_is_a_job(empty_folder: Path) -> None:
    path = add_job(empty_folder / "night work", "mine")
    assert find_job("night work/mine.yaml", None).path == Path("night work/mine.yaml")
    assert find_job(str(path), None).name == "mine"


def test_a_path_that_does_not_exist_is_refused(empty_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        find_job("mine.yaml", None)
    path = add_job(empty_folder / "jobs", "mine")
    with pytest.raises(ConfigError, match=f"job=mine perhaps, which is {path}; .*: demo, mine"):
        find_job("mine.yaml", None)


def test_an_unknown_name_is_answered_with_the_nearest_and_all(empty_folder: Path) -> None:
    with pytest.raises(ConfigError, match="demo perhaps; one of demo") as caught:
        find_job("dmeo", None)
    assert str(empty_folder / "jobs") in str(caught.value)


def test_a_folder_is_looked_through_once(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGED.parent)
    with pytest.raises(ConfigError) as caught:
        find_job("dmeo", PACKAGED)
    assert str(caught.value).count(f"{PACKAGED},") == 1
    assert f"{PACKAGED})" not in str(caught.value)


def test_every_packaged_job_is_valid(tmp_path: Path) -> None:
    for job in list_jobs(None):
        config = validate(compose_job(job, [f"sink.path={tmp_path}"], None))
        assert Path(config.source.path).is_file()


def test_the_demo_table_is_its_readable_source() -> None:
    table = pq.read_table(PACKAGED / "demo" / "support.parquet")
    assert table.equals(pyarrow.json.read_json(PACKAGED / "demo" / "support.jsonl"))
    assert table.num_rows == 72
    assert len(set(table["ticket"].to_pylist())) == 72
    assert len(set(table["message"].to_pylist())) == 72
