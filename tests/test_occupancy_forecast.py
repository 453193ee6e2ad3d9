"""The blocks that will be in use."""

from __future__ import annotations

import numpy as np
import pytest

from engine.occupancy_forecast import (
    DEVIATIONS,
    FEWEST_TRIED,
    MOST_SPARE_SHARE,
    SPARE_SHARE,
    Newcomer,
    OccupancyForecast,
)
from engine.output_lengths import NO_GROUP, OutputLengths
from engine.request import Request, Sampling
from engine.sequence import Sequence, SequenceTable

SIZE = 16
CAP = 1000


def table_of(rows: list[tuple[int, int, int]], shared: int = 0) -> SequenceTable:
    """Rows of (prompt tokens, output tokens, cap), of whose blocks the first `shared` are those of all."""
    table = SequenceTable(max(1, len(rows)), SIZE)
    for row, (prompt, output, cap) in enumerate(rows):
        held = -(-(prompt + output) // SIZE)
        blocks = np.concatenate((np.arange(shared), np.arange(shared, held) + 1000 * (row + 1))).astype(np.int32)
        sampling = Sampling(max_tokens=cap)
        sequence = Sequence(Request(row, np.ones(prompt, np.int32), sampling), output=np.ones(output, np.int32))
        table.admit(sequence, blocks, (shared if row else 0) * SIZE, prompt + cap)
    return table


def lengths_of(lengths: list[int], table: SequenceTable) -> OutputLengths:
    found = OutputLengths()
    if lengths:
        found.record(np.array(lengths), np.ones(len(lengths), np.bool_), np.full(len(lengths), NO_GROUP))
    running = table.running
    found.update(table.num_tokens[running] - table.prompt_tokens[running], table.group[running], CAP)
    return found


def newcomer(prompt: int, cap: int = CAP, *, samples: int = 1, shared: int = 0) -> Newcomer:
    return Newcomer(prompt, prompt, prompt + cap, shared, -(-prompt // SIZE), 10**6, samples, NO_GROUP)


def blocks_of(tokens: float) -> float:
    return tokens / SIZE + (SIZE - 1) / (2 * SIZE)


def test_use_peaks_right_before_the_ends_that_are_known() -> None:
    # 100 tokens each, ends after 40 and 200 more: all grow for 39 steps, and one alone for 199
    table = table_of([(100, 0, 40), (100, 0, 40), (100, 0, 200)])
    lengths = lengths_of([], table)
    lengths.record(np.array([40]), np.zeros(1, np.bool_), np.array([NO_GROUP]))  # so that limits are believed
    forecast = OccupancyForecast(table, lengths, 10_000, newcomer(16, 1))
    assert forecast.mean.max() == pytest.approx(3 * blocks_of(139), rel=0.01)
    assert forecast.variance.max() == 0


def test_a_newcomer_is_taken_as_long_as_the_peak_fits() -> None:
    table = table_of([(160, 0, 64)])
    lengths = lengths_of([], table)
    lengths.record(np.array([64]), np.zeros(1, np.bool_), np.array([NO_GROUP]))
    peak = blocks_of(160 + 63) + blocks_of(320 + 63)
    # The row that runs is more than a fortieth of the pool.
    enough, short = int(np.ceil(peak / (1 - MOST_SPARE_SHARE))), int(peak / (1 - MOST_SPARE_SHARE)) - 1
    for num_blocks, fits in ((enough, True), (short, False)):
        forecast = OccupancyForecast(table, lengths, num_blocks, newcomer(320, 64))
        assert forecast.take(newcomer(320, 64), alone=False) is fits
    assert OccupancyForecast(table, lengths, short, newcomer(320, 64)).take(newcomer(320, 64), alone=True)


def test_each_newcomer_counts_for_the_next() -> None:
    table = table_of([])
    lengths = lengths_of([50] * 200, table)
    forecast = OccupancyForecast(table, lengths, 1000, newcomer(150))
    taken = 0
    while forecast.take(newcomer(150), alone=False):
        taken += 1
    assert taken == pytest.approx(1000 * (1 - SPARE_SHARE) / blocks_of(199), abs=3)


def test_lengths_of_ended_rows_are_believed_with_a_margin_for_chance() -> None:
    table = table_of([(100, 0, CAP)] * 64)
    lengths = lengths_of([1, 401] * 500, table)
    forecast = OccupancyForecast(table, lengths, 10**6, newcomer(100))
    at = int(forecast.mean.argmax())  # when half of them are gone, and the others about to end
    assert forecast.mean[at] == pytest.approx(32 * blocks_of(500), rel=0.02)
    assert np.sqrt(forecast.variance[at]) == pytest.approx(np.sqrt(64) / 2 * blocks_of(500), rel=0.05)
    needed = forecast.mean[at] + DEVIATIONS * np.sqrt(forecast.variance[at])
    for num_blocks, fits in ((1.05 * needed, True), (0.98 * needed, False)):
        tight = OccupancyForecast(table, lengths, int(num_blocks), newcomer(16, 1))
        assert tight.take(newcomer(16, 1), alone=False) is fits


def test_a_shared_prefix_counts_once_and_until_its_last_sequence_ends() -> None:
    rows = [(160, 0, 17), (160, 0, 33), (160, 0, 65)]
    table = table_of(rows, shared=8)
    lengths = lengths_of([], table)
    lengths.record(np.array([17]), np.zeros(1, np.bool_), np.array([NO_GROUP]))
    forecast = OccupancyForecast(table, lengths, 10**4, newcomer(16, 1))
    assert forecast.mean[0] == pytest.approx(8 + 3 * (blocks_of(160) - 8))
    assert forecast.mean[-1] == pytest.approx(8 + blocks_of(160 + 64) - 8, rel=0.01)


def test_a_newcomer_pays_for_what_it_does_not_share_and_for_each_of_its_samples() -> None:
    table = table_of([(160, 0, 17)])
    lengths = lengths_of([], table)
    lengths.record(np.array([17]), np.zeros(1, np.bool_), np.array([NO_GROUP]))

    def added(taken: Newcomer) -> float:
        forecast = OccupancyForecast(table, lengths, 10**4, taken)
        before = forecast.mean[0]
        assert forecast.take(taken, alone=False)
        return float(forecast.mean[0] - before)

    alone = added(newcomer(168, 17))
    assert alone == pytest.approx(blocks_of(168))
    assert added(newcomer(168, 17, shared=9)) == pytest.approx(alone - 9)
    assert added(newcomer(168, 17, samples=3)) == pytest.approx(alone + 2 * (blocks_of(168) - 10))


def test_before_anything_ended_far_limits_do_not_keep_the_pool_empty() -> None:
    table = table_of([])
    lengths = lengths_of([], table)
    forecast = OccupancyForecast(table, lengths, 320, newcomer(16, 100_000))
    taken = 0
    while forecast.take(newcomer(16, 100_000), alone=not taken):
        taken += 1
    assert taken == pytest.approx(FEWEST_TRIED, abs=4)


def test_many_sequences_cost_few_times_and_groups_have_their_own_curves() -> None:
    rng = np.random.default_rng(1)
    table = table_of([(int(prompt), 5, CAP) for prompt in rng.integers(20, 200, 600)])
    table.group[:300] = 3
    lengths = OutputLengths()
    for group, length in ((3, 20), (NO_GROUP, 400)):
        lengths.record(np.full(200, length), np.ones(200, np.bool_), np.full(200, group))
    lengths.update(np.full(600, 5), table.group, CAP)
    forecast = OccupancyForecast(table, lengths, 10**6, newcomer(100))
    assert len(forecast.mean) < 64
    now, end = forecast.mean[0], forecast.mean[-1]
    assert end < 0.1 * now, "hardly any goes on to its limit"
