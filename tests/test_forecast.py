import numpy as np

from engine.request import Request, Sampling
from runner.forecast import Forecast, ForecastSums
from runner.prompt import RowError
from runner.window import Window

BLOCK = 4


def window(lengths: list[int], errors: list[RowError] | None = None, hits: int = 0) -> Window:
    errors = errors or []
    requests = [Request(row, np.zeros(length, np.int32), Sampling()) for row, length in enumerate(lengths)]
    rows = np.arange(len(lengths) + len(errors))
    return Window(rows, None, requests, errors, {}, prompt_tokens=sum(lengths), highest_hit_tokens=hits)


def forecast(*windows: Window, max_tokens: int = 3, samples: int = 1, max_model_len: int = 20) -> Forecast:
    sums = ForecastSums(block_size=BLOCK, max_model_len=max_model_len, max_tokens=max_tokens, samples=samples)
    for each in windows:
        sums.add(each)
    return sums.total()


def test_tokens_and_rows_add_up_over_windows():
    total = forecast(window([5, 9], hits=4), window([7]), window([]))
    assert (total.rows, total.rows_running, total.rows_failing) == (3, 3, 0)
    assert (total.prompt_tokens, total.longest_prompt, total.highest_hit_tokens) == (21, 9, 4)
    assert total.output_tokens == 9


def test_the_models_limit_bounds_the_output():
    assert forecast(window([18, 19])).output_tokens == 2 + 1


def test_blocks_hold_all_tokens_but_the_last_one():
    assert forecast(window([6])).blocks == 2  # 6 and 3 tokens, 8 of them with K/V
    assert forecast(window([7])).blocks == 3
    assert forecast(window([6, 13])).longest_blocks == 4


def test_samples_share_the_full_blocks_of_the_prompt():
    total = forecast(window([9]), samples=3)
    assert total.blocks == 2 + 3 * 1
    assert total.output_tokens == 9


def test_problems_are_told_by_their_words_and_not_by_their_numbers():
    errors = [RowError(row, f"row {row}: the prompt has {row + 90} tokens") for row in range(5)]
    errors.append(RowError(7, "row 7: column 'text' is null"))
    total = forecast(window([4], errors))
    assert total.rows_failing == 6
    first, second = total.problems
    assert (first.rows, first.first_rows, first.words) == (5, [0, 1, 2], "the prompt has 90 tokens")
    assert (second.rows, second.first_rows, second.words) == (1, [7], "column 'text' is null")


def test_many_kinds_of_problems_do_not_pile_up():
    errors = [RowError(row, f"row {row}: no {chr(97 + row % 26)}{chr(97 + row // 26)}") for row in range(200)]
    total = forecast(window([], errors))
    assert total.rows_failing == 200
    assert len(total.problems) == 21
    assert total.problems[0].words == "other reasons"
    assert total.problems[0].rows == 180
