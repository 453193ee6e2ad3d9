from __future__ import annotations

import hashlib

import numpy as np
import pytest

from benchmarks.workloads import LARGEST_ID, ORDERS, WORKLOADS, Work, in_prefix_order, ordered, planned, totals

DIGESTS = {
    "nano": "4db39767352f329f1708cf5a835f665c",
    "onesys": "a17b061ad59b603f51ed4b642666207e",
    "chat": "f6678e9f59f409fb6df484d8a63ab26f",
    "rag": "608549484a73c6bd055fddcd2c9a44b0",
    "groups": "d85a92ce904f16b435644d383bf68900",
}
"""Of the ids and lengths that all published figures were measured with."""
HIGHEST_HIT_RATES = {"nano": 0.0, "onesys": 0.9521, "chat": 0.0, "rag": 0.8584, "groups": 0.7955}


def digest(work: list[Work]) -> str:
    """Of the prompt length, output length and ids of each request, as little-endian int32."""
    total = hashlib.sha256()
    for prompt, new_tokens in work:
        total.update(np.array([len(prompt), new_tokens, *prompt], "<i4").tobytes())
    return total.hexdigest()[:32]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_published_one_token_for_token(name: str) -> None:
    work = WORKLOADS[name](1.0)
    assert digest(work) == DIGESTS[name]
    assert totals(work, 16)["highest_hit_rate"] == HIGHEST_HIT_RATES[name]
    assert {item.prompt.dtype for item in work} == {np.dtype(np.int32)}
    assert max(int(item.prompt.max()) for item in work) <= LARGEST_ID


@pytest.mark.parametrize(
    ("name", "requests"), [("nano", 25), ("onesys", 409), ("chat", 204), ("rag", 400), ("groups", 80)]
)
def test_a_scale_makes_that_share_of_the_requests(name: str, requests: int) -> None:
    assert len(WORKLOADS[name](0.1)) == requests


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_smallest_scale_makes_one_request_or_group(name: str) -> None:
    assert len(WORKLOADS[name](1e-9)) == (8 if name in ("rag", "groups") else 1)


def test_prefix_order_brings_shuffled_groups_together() -> None:
    ordered = in_prefix_order(WORKLOADS["groups"](0.05))
    documents = [item.prompt[:2000].tobytes() for item in ordered]
    assert [documents.index(document) // 8 for document in documents] == [index // 8 for index in range(40)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_an_order_keeps_every_request(name: str, order: str) -> None:
    work = WORKLOADS[name](0.02)
    assert sorted(map(id, ordered(work, order))) == sorted(map(id, work))


def test_question_major_order_asks_every_document_before_any_of_them_again() -> None:
    work = ordered(WORKLOADS["rag"](0.02), "question-major")
    documents = [item.prompt[:3000].tobytes() for item in work]
    assert len(set(documents)) == 10
    assert documents == documents[:10] * 8


def test_groups_of_different_sizes_drop_out_of_question_major_order_one_by_one() -> None:
    def work(*tokens: int) -> Work:
        return Work(np.array((*[tokens[0]] * 16, *tokens), np.int32), 1)

    first, second, only, third = work(1, 0), work(1, 1), work(2, 0), work(1, 2)
    assert list(map(id, ordered([third, only, second, first], "question-major"))) == list(
        map(id, [first, only, second, third])
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_plan_names_the_next_request_with_the_same_document(order: str) -> None:
    work = WORKLOADS["rag"](0.01)
    plan = planned(work, order, 16)
    assert [id(item) for item, _ in plan] == list(map(id, ordered(work, order)))
    documents = [item.prompt[:3000].tobytes() for item, _ in plan]
    for at, (_, reuse) in enumerate(plan):
        later = documents[at + 1 :]
        if documents[at] in later:
            assert reuse[-1] == (3000 // 16 * 16, 1 + later.index(documents[at]))
        else:
            assert reuse == ()


def test_an_unknown_order_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'sideways'; accepted: sorted, shuffled, question-major"):
        ordered([], "sideways")


def test_totals_count_whole_blocks_and_leave_a_token_to_compute() -> None:
    prompt = np.arange(48, dtype=np.int32)
    counts = totals([Work(prompt, 3), Work(prompt, 4)], 16)
    assert counts == {"requests": 2, "prompt_tokens": 96, "output_tokens": 7, "highest_hit_rate": round(32 / 96, 4)}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_share_of_nothing_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        WORKLOADS["nano"](scale)
