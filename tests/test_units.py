import pytest

from runner.units import CommitEvery, parse_commit_every, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("500 kb", 500_000),
        ("3TB", 3 * 10**12),
        ("0.1TiB", 2**40 // 10),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_a_size_is_exact_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2G", "GiB", "1e3", "0.1", "nan", "2GiB and more"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_commits_come_after_rows_or_seconds() -> None:
    assert parse_commit_every("500") == CommitEvery(rows=500)
    assert parse_commit_every("60s") == CommitEvery(seconds=60.0)
    assert parse_commit_every("0.5 s") == CommitEvery(seconds=0.5)


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5m", "1.5"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an interval"):
        parse_commit_every(text)
