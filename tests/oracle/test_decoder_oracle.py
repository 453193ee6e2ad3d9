"""The decoder over the paged cache against transformers' models, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.kv_cache import KVCache, KVCacheShape
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from kernels.attention import AttentionBatch
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOLERANCE = 1e-4
LENGTHS = (45, 29, 38)
ORIGINAL_LENGTH = 16  # of the scaled RoPE variants; all sequences are longer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [4.0 + i for i in range(16)],
    "original_max_position_embeddings": 64,
}
ALL_FULL = {"sliding_window": None}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one query head a K/V head": ("llama", {"num_key_value_heads": 4}),
    "llama, all query heads on one K/V head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, head_dim of hidden size / heads": ("llama", {"head_dim": None}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    # trap 27: scaled RoPE beyond the original length
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "qwen3, yarn rope": ("qwen3", {"rope_parameters": YARN}),
    # trap 27: only up to the original length, which is the accepted limit
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 256}),
    # trap 24: windows shorter and longer than a block, in all layers and in some
    "mistral, window below a block": ("mistral", {"sliding_window": 12}),
    "mistral, window above a block": ("mistral", {"sliding_window": 21}),
    "mistral, window of one key": ("mistral", {"sliding_window": 1}),
    "mistral, no window": ("mistral", ALL_FULL),
    "qwen2": ("qwen2", {}),
    "qwen2, tied head, windows from layer 1": ("qwen2", {"sliding_window": 12, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, attention biases": ("qwen3", {"attention_bias": True}),
    "qwen3, windows in alternate layers": (
        "qwen3",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe, one dense layer": ("qwen3_moe", {}),
    "qwen3_moe, every other layer sparse, all 8 of 8 experts": (
        "qwen3_moe",
        {"mlp_only_layers": [], "decoder_sparse_step": 2, "num_experts": 8, "num_experts_per_tok": 8},
    ),
    "qwen3_moe, weights as they are, window in all layers": (
        "qwen3_moe",
        {"norm_topk_prob": False, "sliding_window": 12},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window below a block": ("mixtral", {"sliding_window": 12}),
}


@dataclass(frozen=True)
class Pair:
    """A transformers model and our decoder with the same weights."""

    reference: PreTrainedModel
    decoder: Decoder


@pytest.fixture(scope="module", params=list(MODELS.values()), ids=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, overrides = request.param
    folder = tmp_path_factory.mktemp("model")
    reference = save_tiny_model(folder, family, **overrides)
    return Pair(reference, _load(folder))


def _load(folder: Path) -> Decoder:
    return load_decoder(folder, read_model_config(folder), dtype=torch.float32, device=CPU)


class PagedSequences:
    """Token sequences that are fed to a decoder step by step, over shuffled blocks of one cache."""

    def __init__(self, decoder: Decoder, token_ids: list[Tensor]) -> None:
        config = decoder.config
        shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32)
        per_sequence = max(len(ids) for ids in token_ids) // BLOCK_SIZE + 1
        blocks = torch.randperm(per_sequence * len(token_ids), generator=torch.Generator().manual_seed(1))
        self.decoder = decoder
        self.token_ids = token_ids
        self.block_tables = blocks.int().view(len(token_ids), per_sequence)
        self.computed = [0] * len(token_ids)
        self.cache = KVCache(shape, len(blocks), CPU)
        for layer in range(config.num_layers):
            for part in self.cache.layer(layer):
                part.fill_(torch.nan)  # trap 20: what was never written must not matter

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next `counts[s]` tokens of each sequence s; their logits by sequence."""
        members = sorted(counts, key=lambda s: counts[s] != 1)  # decodes lead
        ends = {s: self.computed[s] + counts[s] for s in members}
        positions = [torch.arange(self.computed[s], ends[s]) for s in members]
        lengths = [counts[s] for s in members]
        batch = AttentionBatch(
            block_tables=self.block_tables,
            table_rows=torch.tensor(members, dtype=torch.int32),
            query_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
            context_lens=torch.tensor([ends[s] for s in members], dtype=torch.int32),
            num_decodes=lengths.count(1),
            max_query_len=max(lengths),
            max_context_len=max(ends.values()),
        )
        slots = [
            self.block_tables[s, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            for s, at in zip(members, positions, strict=True)
        ]
        token_ids = [self.token_ids[s][at] for s, at in zip(members, positions, strict=True)]
        hidden = self.decoder.embed_tokens[torch.cat(token_ids)]
        hidden = self.decoder(hidden, torch.cat(positions), self.cache, batch, torch.cat(slots))
        for s in members:
            self.computed[s] = ends[s]
        return dict(zip(members, self.decoder.logits(hidden).split(lengths), strict=True))

    def run(self, schedule: Iterator[dict[int, int]]) -> list[Tensor]:
        """Logits [tokens, vocab] of each sequence after all steps of the schedule."""
        rows: list[list[Tensor]] = [[] for _ in self.token_ids]
        for counts in schedule:
            for s, logits in self.step(counts).items():
                rows[s].append(logits)
        assert self.computed == [len(ids) for ids in self.token_ids]
        return [torch.cat(parts) for parts in rows]


def _at_once(lengths: tuple[int, ...]) -> Iterator[dict[int, int]]:
    yield dict(enumerate(lengths))


def _in_chunks(lengths: tuple[int, ...], size: int) -> Iterator[dict[int, int]]:
    for start in range(0, max(lengths), size):
        yield {s: min(size, length - start) for s, length in enumerate(lengths) if start < length}


def _prefill_then_decode(lengths: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """Sequence 0 decodes from its 6th token on, while the others still prefill in chunks of 5."""
    yield {0: 5}
    yield from _together(_in_chunks((lengths[0] - 5,), 1), _in_chunks((0, *lengths[1:]), 5))


def _together(*schedules: Iterator[dict[int, int]]) -> Iterator[dict[int, int]]:
    running = list(schedules)
    while merged := [counts for schedule in running if (counts := next(schedule, None)) is not None]:
        yield {s: count for counts in merged for s, count in counts.items()}


SCHEDULES = {
    "prefill at once": _at_once,
    "prefill in chunks": lambda lengths: _in_chunks(lengths, 7),
    "one token a step": lambda lengths: _in_chunks(lengths, 1),
    "decodes beside prefill chunks": _prefill_then_decode,
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@torch.inference_mode()
def test_logits_equal_transformers(pair: Pair, schedule: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab = pair.decoder.config.vocab_size
    sequences = [torch.randint(vocab, (length,), generator=generator) for length in LENGTHS]

    computed = PagedSequences(pair.decoder, sequences).run(schedule(LENGTHS))

    for token_ids, ours in zip(sequences, computed, strict=True):
        expected = pair.reference(token_ids[None]).logits[0]
        assert ours.dtype == torch.float32
        assert (ours - expected).abs().max() / expected.abs().max() <= TOLERANCE


@torch.inference_mode()
def test_a_prefix_filled_in_the_same_step_is_read(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path)
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(320, (BLOCK_SIZE,), generator=generator)
    ids = [torch.cat((prefix, torch.randint(320, (5,), generator=generator))) for _ in range(2)]
    sequences = PagedSequences(_load(tmp_path), ids)
    sequences.block_tables[1, 0] = sequences.block_tables[0, 0]
    sequences.computed[1] = BLOCK_SIZE

    logits = sequences.step({0: BLOCK_SIZE + 5, 1: 5})

    expected = reference(ids[1][None]).logits[0, BLOCK_SIZE:]
    assert (logits[1] - expected).abs().max() / expected.abs().max() <= TOLERANCE


@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    exact = save_tiny_model(tmp_path, "qwen3")
    decoder = load_decoder(tmp_path, read_model_config(tmp_path), dtype=torch.bfloat16, device=CPU)
    ids = torch.arange(0, 320, 5)  # every token a sequence of its own: nothing but rounding is left to differ

    shape = KVCacheShape(3, 2, 32, BLOCK_SIZE, torch.bfloat16)
    batch = AttentionBatch(
        block_tables=torch.arange(64, dtype=torch.int32)[:, None],
        table_rows=torch.arange(64, dtype=torch.int32),
        query_start=torch.arange(65, dtype=torch.int32),
        context_lens=torch.ones(64, dtype=torch.int32),
        num_decodes=64,
        max_query_len=1,
        max_context_len=1,
    )
    positions, slots = torch.zeros(64, dtype=torch.int64), torch.arange(64) * BLOCK_SIZE
    logits = decoder.logits(decoder(decoder.embed_tokens[ids], positions, KVCache(shape, 64, CPU), batch, slots))

    expected = exact(ids[:, None]).logits[:, 0]
    theirs = exact.bfloat16()(ids[:, None]).logits[:, 0].float()
    assert (logits - expected).norm() <= 1.1 * (theirs - expected).norm()
