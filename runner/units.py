"""Sizes and commit intervals as they are written in a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

SIZE_WORDS = "a positive number of bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
COMMIT_WORDS = 'a positive number of rows such as 10000, or of seconds such as "60s"'

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b)?", re.IGNORECASE)
_COMMIT = re.compile(r"(?:(\d+)|(\d+(?:\.\d+)?)\s*s)")


@dataclass(frozen=True)
class CommitEvery:
    """When the sink commits: after so many rows or so many seconds; exactly one is set."""

    rows: int | None = None
    seconds: float | None = None


def parse_size(text: str) -> int:
    """Whole bytes in a size such as "2GiB" (2 * 2**30), "500 MB" (500 * 10**6) or "4096".

    Raises:
        ValueError: the text is not a size, or one of less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match is not None:
        number, prefix, binary = match.groups()
        power = 1 + "kmgt".index(prefix.lower()) if prefix else 0
        size = int(Fraction(number) * (1024 if binary else 1000) ** power)
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: {SIZE_WORDS}")
    return size


def parse_commit_every(text: str) -> CommitEvery:
    """Rows ("10000") or seconds ("60s", "0.5s") between two commits.

    Raises:
        ValueError: the text is neither, or not positive.
    """
    match = _COMMIT.fullmatch(text.strip())
    if match is not None:
        rows, seconds = match.groups()
        if rows is not None and int(rows) > 0:
            return CommitEvery(rows=int(rows))
        if seconds is not None and float(seconds) > 0:
            return CommitEvery(seconds=float(seconds))
    raise ValueError(f"{text!r} is not an interval: {COMMIT_WORDS}")
