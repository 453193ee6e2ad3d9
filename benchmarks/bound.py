"""How fast an H200 could run a workload: the time of its products and reads alone, under one simple schedule.

A step costs max(weight bytes / bandwidth, FLOPs of the products / rate) for the weights, the keys and values that
decodes read / bandwidth, and the FLOPs of prefill attention / rate; none of these overlap. Launches, host work and
sampling cost nothing. Prompts run whole, in prefix order, as soon as their full length fits into the pool; a shared
prefix is computed once, and read again for every sequence. A yardstick rather than a strict bound: reads from the
L2 cache cost less, prefixes can be read once for all, and a better order shortens the tail.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import Work, in_prefix_order
from runner.plan import highest_hit_tokens

DEVICE = "H200"
BANDWIDTH = 4.3e12
"""Bytes a second of long reads, measured on an H200."""
RATE = 655e12
"""bfloat16 FLOP a second, sustained over 10 s by the products of an 8B model at 1,024 rows or more."""
STEP_TOKENS = 16_384
"""No further prompt is admitted to a step that computes so many tokens."""
BLOCK_SIZE = 16
_ITEM_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Parameter counts of a decoder's products, and what attention costs a token; norms and biases are left out."""

    attention: int
    """Projections of all layers."""
    expert: int
    """One expert (of a dense model: the MLP) in each of the layers."""
    experts: int
    active_experts: int
    """Experts that a token goes through."""
    head: int
    kv_bytes: int
    """Keys and values of one token in all layers."""
    pair_flops: int
    """FLOPs of attention for one query and one key, in all layers and heads."""

    def weight_bytes(self, tokens: int) -> float:
        """Bytes read for a step of `tokens` tokens, whose experts are drawn evenly and independently."""
        missed = (1 - self.active_experts / self.experts) ** tokens
        touched = self.experts * (1 - missed) if self.experts > 1 else 1
        return _ITEM_BYTES * (self.attention + self.expert * touched + self.head)

    def product_flops(self, tokens: int, sampled: int) -> int:
        """FLOPs of all products with weights, for `tokens` tokens of which `sampled` reach the head."""
        return 2 * (self.attention + self.expert * self.active_experts) * tokens + 2 * self.head * sampled


def read_model_cost(folder: Path) -> ModelCost:
    """From a model folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    return ModelCost(
        attention=layers * 2 * hidden * (heads + kv_heads) * head_dim,
        expert=layers * 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"]),
        experts=config.get("num_experts") or config.get("num_local_experts", 1),  # transformers writes either
        active_experts=config.get("num_experts_per_tok", 1),
        head=hidden * config["vocab_size"],
        kv_bytes=layers * 2 * kv_heads * head_dim * _ITEM_BYTES,
        pair_flops=layers * 4 * heads * head_dim,
    )


def bound_seconds(work: list[Work], cost: ModelCost, pool_tokens: float) -> float:
    """Seconds for all of `work` with a K/V pool of `pool_tokens` tokens."""
    waiting = deque(_prompts(work))
    running = np.empty((3, 0), np.int64)  # of each sequence: keys it sees, tokens left to draw, tokens reserved
    seconds = 0.0
    while waiting or running.size:
        context, _, reserved = running
        admitted = _admit(waiting, computed=len(context), room=pool_tokens - reserved.sum())
        seconds += _step_seconds(cost, context, admitted)
        rows = [(prompt.own + prompt.shared, prompt.new_tokens, prompt.reserved) for prompt in admitted]
        running = np.concatenate((running, np.array(rows, np.int64).reshape(-1, 3).T), axis=1)
        running += np.array([[1], [-1], [0]])
        running = running[:, running[1] > 0]
    return seconds


class _Prompt(NamedTuple):
    own: int
    """Tokens to compute."""
    shared: int
    """Tokens in whole blocks that the prompt before it has, too."""
    new_tokens: int

    @property
    def reserved(self) -> int:
        return self.own + self.new_tokens


def _prompts(work: list[Work]) -> Iterator[_Prompt]:
    first = Work(np.empty(0, np.int32), 0)
    for previous, item in pairwise([first, *in_prefix_order(work)]):
        shared = highest_hit_tokens((previous.prompt, item.prompt), BLOCK_SIZE)
        yield _Prompt(len(item.prompt) - shared, shared, item.new_tokens)


def _admit(waiting: deque[_Prompt], *, computed: int, room: float) -> list[_Prompt]:
    """The prompts that start in a step beside `computed` decodes; one that fits nowhere runs alone."""
    admitted: list[_Prompt] = []
    while waiting and computed < STEP_TOKENS:
        room -= waiting[0].reserved
        if room < 0 and computed:
            break
        admitted.append(waiting.popleft())
        computed += admitted[-1].own
    return admitted


def _step_seconds(cost: ModelCost, context: npt.NDArray[np.int64], admitted: list[_Prompt]) -> float:
    """A step of one decode for each of `context` (keys it sees) and all of the `admitted` prompts."""
    tokens = len(context) + sum(prompt.own for prompt in admitted)
    weights = cost.weight_bytes(tokens) / BANDWIDTH
    products = cost.product_flops(tokens, len(context) + len(admitted)) / RATE
    reads = int(context.sum()) * cost.kv_bytes / BANDWIDTH
    pairs = sum(prompt.own * prompt.shared + prompt.own * (prompt.own + 1) / 2 for prompt in admitted)
    return max(weights, products) + reads + pairs * cost.pair_flops / RATE
