"""Batches through a real decoder on the CPU: which tokens are drawn, and for which rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import Batch, build_batch
from engine.kv_cache import KVCache, KVCacheShape
from engine.model_runner import LaunchedBatch, ModelRunner
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from engine.request import Request, Sampling
from engine.scheduler import Limits
from engine.sequence import Sequence as Row
from engine.sequence import SequenceTable
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPTS = [[7 * row + place for place in range(3 + 4 * row)] for row in range(7)]  # 3 to 27 tokens
GREEDY = [Sampling()] * len(PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return save_tiny_model(folder, "llama")


@pytest.fixture
def decoder(folder: Path, reference: PreTrainedModel) -> Decoder:
    return load_decoder(folder, read_model_config(folder), dtype=torch.float32, device=CPU)


def make_runner(decoder: Decoder, vocab_limit: int | None = None) -> ModelRunner:
    shape = KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=32, block_size=BLOCK_SIZE, dtype=torch.float32)
    limits = Limits(max_seqs=len(PROMPTS), max_batch_tokens=1000, max_model_len=2 * BLOCK_SIZE)
    return ModelRunner(decoder, KVCache(shape, 2 * len(PROMPTS), CPU), limits, vocab_limit=vocab_limit)


def make_table(sampling: Sequence[Sampling]) -> SequenceTable:
    """The prompts as running sequences of two blocks each, nothing computed."""
    table = SequenceTable(len(PROMPTS), BLOCK_SIZE)
    for row, (prompt, chosen) in enumerate(zip(PROMPTS, sampling, strict=True)):
        request = Request(row, np.array(prompt, np.int32), chosen)
        table.admit(Row(request), np.array([2 * row, 2 * row + 1], np.int32), 0, 64)
    return table


def whole_prompts(sampling: Sequence[Sampling] = GREEDY) -> Batch:
    table = make_table(sampling)
    return build_batch(table, table.running, table.num_tokens[table.running])


@torch.inference_mode()
def last_logits(reference: PreTrainedModel) -> torch.Tensor:
    return torch.stack([reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])


def drawn_ids(launched: LaunchedBatch) -> list[int]:
    drawn = launched.wait()
    assert not drawn.failed.any()
    assert drawn.token_ids.dtype == np.int32
    return drawn.token_ids.tolist()


def test_ids_beyond_the_vocabulary_limit_are_not_drawn_and_the_next_best_is(
    decoder: Decoder, reference: PreTrainedModel
) -> None:
    # trap 26
    logits = last_logits(reference)
    best = logits.argmax(dim=1).tolist()
    limit = sorted(best)[len(best) // 2]
    limited = logits[:, :limit].argmax(dim=1).tolist()
    assert drawn_ids(make_runner(decoder).launch(whole_prompts())) == best
    assert drawn_ids(make_runner(decoder, limit).launch(whole_prompts())) == limited != best


@pytest.mark.parametrize("rows_at_once", [1, 3, 6, 7])
def test_rows_sampled_in_slices_draw_what_they_draw_together(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    sampling = [
        Sampling(temperature=0.0 if row % 3 == 1 else 0.5 + row, top_k=40 * (row % 2), top_p=1 - 0.05 * row, seed=row)
        for row in range(len(PROMPTS))
    ]
    together = drawn_ids(make_runner(decoder).launch(whole_prompts(sampling)))
    monkeypatch.setattr("engine.model_runner.SAMPLED_ROWS_AT_ONCE", rows_at_once)
    assert drawn_ids(make_runner(decoder).launch(whole_prompts(sampling))) == together
    assert drawn_ids(make_runner(decoder).launch(whole_prompts())) != together


def test_suppressed_ids_follow_their_row_into_its_slice(
    decoder: Decoder, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trap 30
    first = last_logits(reference).argmax(dim=1).tolist()
    held = {0, 4, 5}
    sampling = [
        Sampling(min_tokens=int(row in held), stop_token_ids=(first[row], *first)) for row in range(len(PROMPTS))
    ]
    expected = [
        next(token for token in ranked if row not in held or token not in first)
        for row, ranked in enumerate(last_logits(reference).argsort(dim=1, descending=True).tolist())
    ]
    monkeypatch.setattr("engine.model_runner.SAMPLED_ROWS_AT_ONCE", 2)
    found = drawn_ids(make_runner(decoder).launch(whole_prompts(sampling)))
    assert found == expected
    assert {row for row, token in enumerate(found) if token != first[row]} == held


def test_a_step_that_samples_nothing_still_writes_what_the_next_one_reads(decoder: Decoder) -> None:
    # trap 5
    runner, table = make_runner(decoder), make_table(GREEDY)
    slots = table.running
    nothing = runner.launch(build_batch(table, slots, np.full(len(slots), 2))).wait()
    assert (nothing.token_ids.dtype, nothing.token_ids.shape) == (np.int32, (0,))
    assert (nothing.failed.dtype, nothing.failed.shape) == (np.bool_, (0,))
    table.num_computed[slots] += 2
    rest = runner.launch(build_batch(table, slots, table.num_tokens[slots] - 2))
    assert drawn_ids(rest) == drawn_ids(make_runner(decoder).launch(whole_prompts()))


def test_a_row_whose_logits_are_not_finite_is_named_and_the_others_draw_as_before(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trap 37
    before = drawn_ids(make_runner(decoder).launch(whole_prompts()))
    poisoned = 38  # a token of the last prompt but two alone
    bad = [row for row, prompt in enumerate(PROMPTS) if poisoned in prompt]
    assert 0 < len(bad) < len(PROMPTS)
    with torch.no_grad():
        decoder.embed_tokens[poisoned] = torch.nan
    monkeypatch.setattr("engine.model_runner.SAMPLED_ROWS_AT_ONCE", 4)
    drawn = make_runner(decoder).launch(whole_prompts()).wait()
    assert np.flatnonzero(drawn.failed).tolist() == bad
    assert [token for row, token in enumerate(drawn.token_ids.tolist()) if row not in bad] == [
        token for row, token in enumerate(before) if row not in bad
    ]


def test_a_step_reads_the_tokens_that_the_step_before_drew_without_the_host(decoder: Decoder) -> None:
    runner, table = make_runner(decoder), make_table(GREEDY)
    slots = table.running
    counts = table.num_tokens[slots].copy()
    first = runner.launch(build_batch(table, slots, counts))
    table.num_computed[slots] += counts
    table.append_unread(slots)
    unread = runner.launch(build_batch(table, slots, np.ones(len(slots), np.int64)))
    table.read(slots, table.num_tokens[slots] - 1, first.wait().token_ids)
    read = runner.launch(build_batch(table, slots, np.ones(len(slots), np.int64)))
    assert drawn_ids(unread) == drawn_ids(read) != drawn_ids(first)


def test_on_a_cpu_no_allocator_is_asked(decoder: Decoder) -> None:
    assert make_runner(decoder).memory() == (0, 0)
