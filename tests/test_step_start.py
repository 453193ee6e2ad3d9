"""Both forms of the start of a step. Without a GPU, Triton's interpreter runs the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.step_start import start_step
from tests.interpreted import interpreted
from tests.step_start_cases import expected_start, make_start

Start = Callable[..., Tensor]


@pytest.fixture
def triton_form() -> Start:
    return interpreted("kernels.step_start_triton").start_step_triton


@pytest.fixture(params=["torch", "triton"])
def start(request: pytest.FixtureRequest) -> Start:
    return start_step if request.param == "torch" else request.getfixturevalue("triton_form")


@pytest.mark.parametrize(
    ("tokens", "changes"), [(1, 0), (5, 5), (40, 17), (2, 300), (0, 200), (0, 0)], ids=lambda count: str(count)
)
@pytest.mark.parametrize("size", [64, 100])
def test_tokens_are_looked_up_and_changes_made(start: Start, tokens: int, changes: int, size: int) -> None:
    step = make_start(tokens, changes, size)
    hidden, tables = expected_start(**step)
    assert torch.equal(start(**step), hidden)
    assert torch.equal(step["block_tables"], tables)


def test_unread_tokens_are_the_last_ones_of_their_slots_and_failed_ones_token_0(start: Start) -> None:
    step = make_start(4, 0, 32)
    step["token_ids"] = torch.tensor([-1, 3, -3, -2], dtype=torch.int32)
    step["last_tokens"] = torch.tensor([7, -1, 9], dtype=torch.int32)
    assert torch.equal(start(**step), step["embedding"][[7, 3, 9, 0]])


# trap 22
def test_padding_may_change_one_place_many_times(start: Start) -> None:
    step = make_start(3, 60, 32)
    step["changed_places"][20:] = step["block_tables"].numel() - 1
    step["changed_blocks"][20:] = 0
    _, tables = expected_start(**step)
    start(**step)
    assert torch.equal(step["block_tables"], tables)


@pytest.mark.parametrize("name", ["embedding", "block_tables"])
def test_triton_form_refuses_what_is_not_contiguous(triton_form: Start, name: str) -> None:
    step = make_start(3, 3, 32)
    step[name] = step[name].T.contiguous().T
    with pytest.raises(ValueError, match=f"{name} has strides"):
        triton_form(**step)
