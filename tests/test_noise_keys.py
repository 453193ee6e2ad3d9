"""The keys of the noise belong to the token that is drawn, and to nothing else."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from engine.noise_keys import position_keys, row_key

SEEDS = np.array([0, 0, 1, -(2**63), 2**63 - 1, 42])
DRAW_IDS = np.array([0, 1, 123_456_789, 7, -3, 2**40])
SAMPLES = np.array([0, 0, 3, 1, 0, 7])
POSITIONS = np.array([0, 5, 1000, 17, 4096, 131_071])


def test_keys_never_change_from_release_to_release() -> None:
    # An unfinished job that is resumed must draw as it did.
    keys = position_keys(row_key(SEEDS, DRAW_IDS, SAMPLES), POSITIONS)
    assert keys.dtype == np.int32
    assert keys.tolist() == [
        [-1429732760, 556823690],
        [-1239562469, -1567681923],
        [-134624849, -1984961679],
        [-466840287, -2114555801],
        [-661369917, 1673322409],
        [1463721152, 734164958],
    ]


@pytest.mark.parametrize("row", range(len(SEEDS)))
def test_one_row_has_the_key_it_has_among_many(row: int) -> None:
    # trap 13
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = row_key(int(SEEDS[row]), int(DRAW_IDS[row]), int(SAMPLES[row]))
    assert alone == row_key(SEEDS, DRAW_IDS, SAMPLES)[row]


def test_seed_row_sample_and_position_each_change_both_keys() -> None:
    # trap 13
    rows = row_key(np.array([0, 1, 0, 0, 0]), np.array([0, 0, 1, 0, 0]), np.array([0, 0, 0, 1, 0]))
    keys = position_keys(rows, np.array([5, 5, 5, 5, 6]))
    assert len(np.unique(keys)) == keys.size


def test_neighbouring_rows_and_positions_share_no_key() -> None:
    rows, positions = np.meshgrid(np.arange(300), np.arange(300))
    zeros = np.zeros(rows.size, np.int64)
    keys = position_keys(row_key(zeros, rows.ravel(), zeros), positions.ravel())
    assert len(np.unique(keys, axis=0)) == rows.size
