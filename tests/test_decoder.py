"""What a step of the decoder takes and gives; tests/oracle compares its numbers with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.kv_cache import KVCache, KVCacheShape
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from kernels.attention import AttentionBatch
from tests.tiny_models import FAMILIES, save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKEN_IDS = torch.tensor([5, 6, 7, 8, 9])


def load(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Decoder:
    save_tiny_model(folder, family)
    return load_decoder(folder, read_model_config(folder), dtype=dtype, device=CPU)


def step(decoder: Decoder, token_ids: Tensor, padding: int = 0, **more: Any) -> tuple[Tensor, Tensor]:
    """Prefill one sequence, its tokens behind each other, with padding after it; hidden states and the cache."""
    config, tokens = decoder.config, len(token_ids) - padding
    dtype = decoder.embed_tokens.dtype
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    cache = KVCache(shape, 1, CPU)
    for layer in range(config.num_layers):
        for part in cache.layer(layer):
            part.fill_(torch.nan)
    batch = AttentionBatch(
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        table_rows=torch.zeros(1, dtype=torch.int32),
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        num_decodes=0,
        max_query_len=tokens,
        max_context_len=tokens,
    )
    positions = torch.arange(len(token_ids))
    slots = torch.where(positions < tokens, positions, -1)
    with torch.inference_mode():
        hidden = decoder(decoder.embed_tokens[token_ids], positions, cache, batch, slots, **more)
    return hidden, torch.stack(cache.layer(config.num_layers - 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_other_token_and_is_not_stored(tmp_path: Path, family: str) -> None:
    decoder = load(tmp_path, family)
    expected, _ = step(decoder, TOKEN_IDS)
    hidden, stored = step(decoder, torch.cat((TOKEN_IDS, torch.tensor([3, 3, 3]))), padding=3)  # trap 22
    torch.testing.assert_close(hidden[:5], expected, rtol=0, atol=1e-5)
    assert stored.flatten(1, 2).isfinite().all(-1).all(-1).sum(1).tolist() == [5, 5]


def test_the_result_goes_into_out(tmp_path: Path) -> None:
    decoder = load(tmp_path)
    expected, _ = step(decoder, TOKEN_IDS)
    out = torch.full((8, decoder.config.hidden_size), torch.nan)
    hidden, _ = step(decoder, TOKEN_IDS, out=out[:5])
    assert hidden.data_ptr() == out.data_ptr()
    assert torch.equal(out[:5], expected)
    assert bool(out[5:].isnan().all())


def test_token_ids_may_be_int32(tmp_path: Path) -> None:
    decoder = load(tmp_path)
    assert torch.equal(step(decoder, TOKEN_IDS.int())[0], step(decoder, TOKEN_IDS)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_and_logits_have_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = load(tmp_path, dtype=dtype)
    hidden, _ = step(decoder, TOKEN_IDS)
    logits = decoder.logits(hidden)
    assert hidden.dtype == logits.dtype == dtype
    assert logits.shape == (5, decoder.config.vocab_size)


# Norms have random weights, and rows are normed after products; in float16 before them.
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_half_types_are_as_close_to_float32_as_in_transformers(tmp_path: Path, family: str) -> None:
    reference = save_tiny_model(tmp_path, family)
    expected = reference(TOKEN_IDS[None]).logits[0]
    for dtype in (torch.bfloat16, torch.float16):
        decoder = load_decoder(tmp_path, read_model_config(tmp_path), dtype=dtype, device=CPU)
        ours = decoder.logits(step(decoder, TOKEN_IDS)[0]).float()
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        theirs = rounded(TOKEN_IDS[None]).logits[0].float()
        assert (ours - expected).norm() <= 1.5 * (theirs - expected).norm()
