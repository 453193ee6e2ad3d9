"""Greedy completions of our engine, judged by transformers' logits on the very same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.engine import Engine
from engine.models.config import read_model_config
from engine.request import Completion, Request, Sampling
from engine.startup import EngineSettings, Started, resolve, start

NEAR_TIE = 1e-4
"""Two best logits of the reference closer than this may change places."""


def start_engine(folder: Path, **settings: Any) -> Started:
    """An engine in float32 on the model of a folder."""
    config = read_model_config(folder)
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": 1 << 26}
    chosen = EngineSettings(**values | settings)
    return start(folder, config, chosen, resolve(chosen, config), Sampling(), end_token_ids=config.end_token_ids)


def run(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """Complete all `requests` and return the completions in order of (row, sample)."""
    for request in requests:
        engine.add(request)
    completions: list[Completion] = []
    while engine.has_work:
        completions += engine.step().completions
    return sorted(completions, key=lambda completion: (completion.row_id, completion.sample))


def complete(started: Started, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Completion]:
    """The completions of `prompts`, in their order."""
    settings = Sampling(**sampling)
    requests = [Request(row, np.array(prompt, np.int32), settings) for row, prompt in enumerate(prompts)]
    return run(started.engine, requests)


@torch.inference_mode()
def near_ties(reference: Any, prompt: Sequence[int], output: Sequence[int], vocab: int | None = None) -> int:
    """How often the reference's two best logits were too close to call; fails where a token is not its best.

    `vocab`: ids from here on are out of the question.

    One forward over prompt and output gives the reference's choice at every position given what came
    before it: if all agree, its own greedy run makes the same tokens.
    """
    ids = torch.tensor([[*prompt, *output]])
    logits = reference(ids).logits[0, len(prompt) - 1 : -1, :vocab].float()
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(output, dtype=torch.long)[:, None])[:, 0]
    behind = best - chosen
    assert float(behind.max()) <= NEAR_TIE, f"token {int(behind.argmax())} is {float(behind.max()):.2e} behind the best"
    runner_up = logits.topk(2, dim=-1).values[:, 1]
    return int((best - runner_up <= NEAR_TIE).sum())
