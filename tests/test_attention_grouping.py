"""The rule against what was measured on an H200."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.attention_grouping import grouping_pays

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "grouping.jsonl"


@dataclass(frozen=True)
class Groups:
    """Groups of equal size that share so many keys."""

    groups: int
    size: int
    shared: int
    heads: int = 32
    kv_heads: int = 8

    @property
    def pays(self) -> bool:
        members = self.groups * self.size
        return grouping_pays(
            saved_keys=(members - self.groups) * self.shared,
            distinct_keys=self.groups * self.shared,
            members=members,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=128,
            itemsize=2,
        )


MEASURED = [json.loads(line) for line in RESULTS.read_text().splitlines()]


@pytest.mark.parametrize(
    "line", MEASURED, ids=lambda line: "{groups}x{size}x{shared} {heads}/{kv_heads}".format(**line)
)
def test_grouping_costs_at_most_3_percent_and_leaves_no_more_than_10_to_be_gained(line: dict[str, float]) -> None:
    groups = Groups(*(int(line[name]) for name in ("groups", "size", "shared", "heads", "kv_heads")))
    if groups.pays:
        assert line["grouped_us"] <= 1.03 * line["plain_us"]
    else:
        assert line["plain_us"] <= 1.10 * line["grouped_us"]


def test_groups_of_little_stay_apart() -> None:
    assert not Groups(1, 2, 16).pays
    assert not Groups(500, 2, 16).pays
    assert not Groups(1, 1000, 16).pays


def test_a_prefix_of_a_whole_large_batch_is_read_apart() -> None:
    assert Groups(1, 1024, 2000).pays
    assert Groups(100, 8, 2000).pays
