"""Order of the rows of a window, and the prefix reuse that it allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plan import TokenIds, highest_hit_tokens, order_rows

# Few different tokens, so that random prompts share prefixes, end inside each other and repeat.
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=16)


def as_arrays(prompts: list[list[int]]) -> list[TokenIds]:
    return [np.array(prompt, dtype=np.int32) for prompt in prompts]


def definition_of_highest_hits(prompts: list[list[int]], block: int) -> int:
    """H* times the prompt tokens: hit-able blocks less the trie nodes that someone must compute first.

    A node on which some prompt ends exactly is computed by that prompt, which cannot count it as hit.
    """
    nodes: set[tuple[int, ...]] = set()
    ended: set[tuple[int, ...]] = set()
    hitable = 0
    for prompt in prompts:
        for end in range(block, len(prompt) + 1, block):
            if end < len(prompt):
                nodes.add(tuple(prompt[:end]))
                hitable += 1
            else:
                ended.add(tuple(prompt))
    return block * (hitable - len(nodes - ended))


@given(PROMPTS)
def test_prefix_order_is_lexicographic_and_keeps_equal_prompts_in_input_order(prompts: list[list[int]]) -> None:
    order = order_rows(as_arrays(prompts), "prefix").tolist()
    assert order == sorted(range(len(prompts)), key=lambda row: (prompts[row], row))


def test_prefix_order_compares_ids_as_numbers_and_puts_a_prompt_before_its_extensions() -> None:
    prompts = as_arrays([[70000], [5, 1], [256], [5], [255], [5, 1, 0], [2**31 - 1]])
    assert order_rows(prompts, "prefix").tolist() == [3, 1, 5, 4, 2, 0, 6]


def test_longest_order_is_stable() -> None:
    order = order_rows(as_arrays([[1], [2, 2], [3], [4, 4, 4], [5, 5]]), "longest")
    assert order.tolist() == [3, 1, 4, 0, 2]
    assert order.dtype == np.int64


def test_input_order_changes_nothing() -> None:
    assert order_rows(as_arrays([[2], [1], [3]]), "input").tolist() == [0, 1, 2]


@pytest.mark.parametrize("by", ["prefix", "longest", "input"])
def test_no_prompts_have_an_empty_order(by: str) -> None:  # trap 54
    order = order_rows([], by)
    assert order.shape == (0,)
    assert order.dtype == np.int64


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted: prefix, longest, input"):
        order_rows([], "shortest")


@given(PROMPTS, st.integers(1, 5))
def test_highest_hits_equal_the_definition_over_trie_nodes(prompts: list[list[int]], block: int) -> None:
    arrays = as_arrays(prompts)
    in_order = [arrays[row] for row in order_rows(arrays, "prefix")]
    assert highest_hit_tokens(in_order, block) == definition_of_highest_hits(prompts, block)


def test_the_last_token_of_an_exact_duplicate_is_computed() -> None:
    prompt = np.arange(8, dtype=np.int32)
    assert highest_hit_tokens([prompt, prompt], 4) == 4
    assert highest_hit_tokens([prompt, np.append(prompt, np.int32(9))], 4) == 8
