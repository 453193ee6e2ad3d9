"""Small memories whose contents can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import block_waste
from benchmarks.block_waste import Lengths, Way, compare, paged_shares, paged_starts, reserved_shares
from benchmarks.contiguous_memory import Buddy, FirstFit


def rows(*lengths: tuple[int, int], times: int = 1) -> Lengths:
    """(Prompt, output) of each row, all of it over again so many times."""
    prompt, output = np.array(lengths * times).T
    return Lengths(prompt, output)


def test_a_reservation_is_held_whole_from_the_first_step_to_the_last() -> None:
    # Each row holds 2, 3 and 4 tokens in its three steps, of the 8 it reserves; two of them run at a time.
    shares = reserved_shares(rows((2, 3), times=12), np.full(12, 8), 20, FirstFit(20))
    assert shares.sequences == 2
    assert shares.tokens == pytest.approx(2 * 3 / 20)
    assert shares.reserved == pytest.approx(2 * 1 / 20)
    assert shares.unused == pytest.approx(2 * 4 / 20)
    assert shares.free == pytest.approx(4 / 20)


def test_a_buddy_allocator_rounds_reservations_up() -> None:
    shares = reserved_shares(rows((2, 3), times=12), np.full(12, 5), 16, Buddy(16))
    assert (shares.sequences, shares.unused, shares.free) == (2, pytest.approx(0.5), pytest.approx(0))


def test_holes_between_reservations_are_free_and_useless() -> None:
    # Rows of 5, 3 and 5 slots by turns: beside 5 and 3, the 4 that are left of 12 hold neither of the 5.
    lengths = rows((5, 1), (3, 1), times=20)
    shares = reserved_shares(lengths, lengths.stored, 12, FirstFit(12))
    assert (shares.sequences, shares.free) == (2, pytest.approx(4 / 12))


def test_paging_holds_blocks_for_the_tokens_there_are() -> None:
    # 4, 5 and 6 tokens take 1, 2 and 2 blocks of 4: of 3 blocks, a row gets its first beside another's last two.
    shares = paged_shares(rows((4, 3), times=12), 12, 4)
    assert shares.sequences == 1.5  # two at every other step
    assert shares.tokens == pytest.approx((6 + 4 + 5) / 24)
    assert shares.reserved == pytest.approx(1 / 24)  # the sixth slot, at the step between
    assert shares.unused == pytest.approx((2 + 2) / 24)
    assert shares.free == pytest.approx(4 / 24)
    assert shares.tokens_of_given == pytest.approx(15 / 20)


def test_a_row_starts_as_soon_as_the_peak_to_come_fits() -> None:
    # Of 4, 5 and 6 tokens, two rows in step take 12 slots at most, one step apart 11, two steps apart 10.
    assert paged_shares(rows((4, 3), times=40), 12, 1).sequences == 2
    assert paged_shares(rows((4, 3), times=40), 11, 1).tokens == pytest.approx(
        (5 + 4 + 6 + 5 + 6 + 4) / 3 / 11, abs=0.02
    )
    assert paged_shares(rows((4, 3), times=40), 10, 1).sequences == pytest.approx(1.5, abs=0.02)
    assert paged_shares(rows((4, 3), times=40), 9, 1).sequences == 1


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_shares_are_those_of_a_simulation_token_by_token(block_size: int) -> None:
    rng = np.random.default_rng(0)
    lengths = Lengths(rng.integers(1, 40, 60), rng.integers(1, 40, 60))
    pool = 240 // block_size * block_size
    starts = paged_starts(lengths, block_size, pool // block_size)
    begin, end = starts[15], starts[-1]
    tokens = given = sequences = 0
    for start, prompt, output in zip(starts, *lengths, strict=True):
        for step in range(max(begin, start), min(end, start + output)):
            tokens += prompt + step - start
            given += -(-(prompt + step - start) // block_size) * block_size
            sequences += 1
    shares = paged_shares(lengths, pool, block_size)
    slots = pool * (end - begin)
    assert shares.tokens == pytest.approx(tokens / slots)
    assert 1 - shares.free == pytest.approx(given / slots)
    assert shares.sequences == pytest.approx(sequences / (end - begin))
    assert shares.tokens + shares.reserved + shares.unused + shares.free == pytest.approx(1)
    assert min(shares.tokens, shares.free) > 0
    assert (shares.reserved > 0) == (shares.unused > 0) == (block_size > 1)


def test_slots_that_are_filled_later_are_told_from_those_that_never_are() -> None:
    # 3, 4 and 5 tokens in blocks of 4: the fourth slot is filled later, the last three never are.
    shares = paged_shares(rows((3, 3), times=12), 8, 4)
    assert (shares.reserved, shares.unused) == (pytest.approx(1 / 24), pytest.approx(3 / 24))


@pytest.mark.parametrize("pool", [7, 8])
def test_a_row_that_never_fits_is_refused(pool: int) -> None:
    with pytest.raises(ValueError, match="9 slots"):
        reserved_shares(rows((5, 5)), np.array([9]), pool, FirstFit(pool))
    with pytest.raises(ValueError, match="3 blocks of 4"):
        paged_shares(rows((5, 5)), pool, 4)


def test_rows_that_never_wait_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing ever waits"):
        paged_shares(rows((5, 5), times=4), 1000, 4)


def test_rows_are_gone_through_again_until_they_hold_enough() -> None:
    cycled = rows((2, 1), (3, 2)).cycled(13)  # 2 and 4 stored tokens by turns
    assert cycled.prompt.tolist() == [2, 3, 2, 3, 2]
    assert rows((2, 1), (3, 2)).cycled(2).prompt.tolist() == [2]


def test_the_power_of_two_is_that_of_the_output() -> None:
    lengths = rows((3, 5), times=600)
    shares = dict(compare(lengths, 256, 64))
    fits = {way.scheme: each.sequences for way, each in shares.items() if way.allocator == "first fit"}
    assert fits["reserve maximum"] == 256 // 64
    assert fits["reserve power of two"] == 256 // (3 + 8)
    assert fits["reserve true length"] == 256 // (3 + 5 - 1)
    assert shares[Way("paging", block_size=1)].sequences > fits["reserve true length"]


def test_lengths_of_a_run_are_compared_and_rows_without_a_completion_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "night" / "completions").mkdir(parents=True)
    for part in range(2):
        columns = {"prompt_tokens": [10, 0, 30], "output_tokens": [5, 0, 7]}
        reasons = ["stop", "error", "length"]
        pq.write_table(pa.table({**columns, "finish_reason": reasons}), folder / f"part-{part}.parquet")
    size = ["--pool-gib", "0.125", "--max-model-len", "64"]
    block_waste.main(["--completions", str(folder), *size, "--commit", "abc"])
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert len(lines) == 3 * 2 + 9 == len(told.err.splitlines()) - 1
    assert {(line["lengths"], line["rows"], line["longest"], line["pool_tokens"]) for line in lines} == {
        ("night", 4, 37, 1024)
    }
    assert {line["mean_prompt_tokens"] for line in lines} == {20}
    assert lines[0]["sequences"] == 1024 // 64
    assert [line["paper_tokens"] for line in lines if line["paper_tokens"]] == [0.204, 0.268, 0.382, 0.963]
    assert lines[0].keys() >= {"date", "commit", "versions"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-model-len", "36"], "--max-model-len 36 must hold the longest row, of 37 tokens"),
        (["--pool-gib", "0.001"], "fit --pool-gib, which holds 8"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"prompt_tokens": [30], "output_tokens": [7], "finish_reason": ["stop"]}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    with pytest.raises(SystemExit) as caught:
        block_waste.main(["--completions", str(tmp_path), *options])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
