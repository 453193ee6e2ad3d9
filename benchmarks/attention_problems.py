"""Attention problems: one launch each over bfloat16 tensors, with what it must read and compute at least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import PREFIX_LEVELS, AttentionBatch, SharedPrefixes

HEAD_DIM = 128
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
_QUERIES_AT_ONCE = 512  # bounds the float32 scores of the reference


@dataclass(frozen=True)
class Problem:
    """Query tokens and keys of each sequence, its own new tokens included; sequences with one query token first.

    `group_size` neighbours read their first `shared` keys (a multiple of BLOCK_SIZE) from the same blocks.
    Heads are those of Llama-3.1-8B unless said otherwise.
    """

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    shared: int = 0
    group_size: int = 1
    heads: int = 32
    kv_heads: int = 8

    @property
    def num_groups(self) -> int:
        return -(-len(self.query_lens) // self.group_size)

    @property
    def shares_decodes(self) -> bool:
        """Whether decodes read keys that others read, too."""
        return self.shared > 0 and max(self.query_lens) == 1

    @property
    def bytes_moved(self) -> int:
        """Bytes of every distinct key and value, every query and every output, once."""
        keys = sum(self.context_lens) - self.shared * (len(self.context_lens) - self.num_groups)
        elements = 2 * keys * self.kv_heads + 2 * sum(self.query_lens) * self.heads
        return elements * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of two products over each pair of a query and a key that it sees, in each head."""
        lengths = zip(self.query_lens, self.context_lens, strict=True)
        pairs = sum(query * (context - query) + query * (query + 1) // 2 for query, context in lengths)
        return 4 * pairs * self.heads * HEAD_DIM

    @cached_property
    def query_start(self) -> tuple[int, ...]:
        return (0, *accumulate(self.query_lens))


def problems() -> list[Problem]:
    """All of them: decodes, decodes behind shared prefixes, prefills, and both in one step."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 1.0, 256), 16, 8192).astype(int)
    return [
        _decode("1x2048", [2048]),
        _decode("1x131072", [131_072]),
        _decode("8x32768", [32_768] * 8),
        _decode("64x1024", [1024] * 64),
        _decode("64x8192", [8192] * 64),
        _decode("256x512", [512] * 256),
        _decode("256x2048", [2048] * 256),
        _decode("1024x700", [700] * 1024),
        _decode("256x ragged", lengths.tolist()),
        _decode("256x1000, 16/8 heads", [1000] * 256, heads=16),
        _shared_decode(1, 256, 2000, 150),
        _shared_decode(1, 1024, 2000, 150),
        _shared_decode(1, 32, 8192, 150),
        _shared_decode(1, 256, 512, 150),
        _shared_decode(1, 16, 2000, 150),
        _shared_decode(1, 64, 512, 1000),
        _shared_decode(100, 8, 2000, 250),
        _shared_decode(100, 8, 2000, 250, heads=32, kv_heads=4),
        _shared_decode(150, 8, 2992, 88, heads=16, kv_heads=8),
        Problem("prefill 8x2048", (2048,) * 8, (2048,) * 8),
        Problem("prefill 1x8192", (8192,), (8192,)),
        Problem("prefill 4x512 after 7680", (512,) * 4, (8192,) * 4),
        Problem("shared prefill 64x100 after 2000", (100,) * 64, (2100,) * 64, shared=2000, group_size=64),
        Problem("mixed 2x1024 + 254 decode x1024", (1,) * 254 + (1024,) * 2, (1024,) * 256),
    ]


def _decode(name: str, context_lens: list[int], heads: int = 32) -> Problem:
    return Problem(f"decode {name}", (1,) * len(context_lens), tuple(context_lens), heads=heads)


def _shared_decode(groups: int, size: int, shared: int, own: int, **heads: int) -> Problem:
    sequences = f"{groups}x{size}" if groups > 1 else f"{size}"
    note = f", {heads['heads']}/{heads['kv_heads']} heads" if heads else ""
    count = groups * size
    return Problem(
        f"shared decode {sequences}x({shared}+{own}){note}",
        (1,) * count,
        (shared + own,) * count,
        shared=shared,
        group_size=size,
        **heads,
    )


@dataclass(frozen=True)
class Inputs:
    """Tensors of one problem, as `kernels.attention.paged_attention` takes them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch


def make_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Normally distributed values in blocks that lie anywhere in a cache without spare blocks."""
    generator = torch.Generator(device).manual_seed(seed)
    tables, num_blocks = _block_tables(problem, seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPE)

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    batch = AttentionBatch(
        block_tables=torch.from_numpy(tables).to(device),
        table_rows=integers(range(len(problem.query_lens))),
        query_start=integers(problem.query_start),
        context_lens=integers(problem.context_lens),
        num_decodes=problem.query_lens.count(1),
        max_query_len=max(problem.query_lens),
        max_context_len=max(problem.context_lens),
        prefixes=_prefixes(problem, device) if problem.shares_decodes else None,
    )
    return Inputs(
        query=normal(sum(problem.query_lens), problem.heads, HEAD_DIM),
        key_cache=normal(num_blocks, BLOCK_SIZE, problem.kv_heads, HEAD_DIM),
        value_cache=normal(num_blocks, BLOCK_SIZE, problem.kv_heads, HEAD_DIM),
        batch=batch,
    )


def _prefixes(problem: Problem, device: torch.device) -> SharedPrefixes:
    """A segment for each group, and padding for as many as there could be."""
    count = len(problem.query_lens)
    first = np.arange(0, count, problem.group_size)
    segments = np.zeros((count, 5), np.int32)
    segments[: len(first), 0] = segments[: len(first), 1] = first
    segments[: len(first), 2] = np.minimum(problem.group_size, count - first)
    segments[: len(first), 4] = problem.shared
    own_segments = np.full((count, PREFIX_LEVELS), -1, np.int32)
    own_segments[:, 0] = np.arange(count) // problem.group_size
    own_start = np.full(count, problem.shared, np.int32)
    return SharedPrefixes(*(torch.from_numpy(words).to(device) for words in (segments, own_start, own_segments)))


def _block_tables(problem: Problem, seed: int) -> tuple[np.ndarray, int]:
    """int32 [sequences, blocks of the longest] in random order, and the number of blocks used."""
    prefix = problem.shared // BLOCK_SIZE
    own = [-(-context // BLOCK_SIZE) - prefix for context in problem.context_lens]
    num_blocks = problem.num_groups * prefix + sum(own)
    unused = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    prefixes, unused = np.split(unused, [problem.num_groups * prefix])
    tables = np.zeros((len(own), prefix + max(own)), np.int32)
    tables[:, :prefix] = prefixes.reshape(problem.num_groups, prefix).repeat(problem.group_size, axis=0)[: len(own)]
    for row, mine in zip(tables, np.split(unused, np.cumsum(own)[:-1]), strict=True):
        row[prefix : prefix + len(mine)] = mine
    return tables, num_blocks


def relative_error(problem: Problem, inputs: Inputs, output: Tensor, sequences: int = 24) -> float:
    """Frobenius norm of the error against float32 over that of the reference; NaN if anything is.

    Looks at up to `sequences` sequences, spread evenly over the batch.
    """
    chosen = np.unique(np.linspace(0, len(problem.query_lens) - 1, sequences).astype(int)).tolist()
    error = norm = 0.0
    for sequence in chosen:
        tokens = slice(*problem.query_start[sequence : sequence + 2])
        context = problem.context_lens[sequence]
        blocks = inputs.batch.block_tables[sequence, : -(-context // BLOCK_SIZE)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:context].float() for cache in (inputs.key_cache, inputs.value_cache)
        )
        for first in range(tokens.start, tokens.stop, _QUERIES_AT_ONCE):
            part = slice(first, min(first + _QUERIES_AT_ONCE, tokens.stop))
            expected = _attend(inputs.query[part].float(), keys, values, context - (tokens.stop - first))
            error += float((output[part].float() - expected).square().sum())
            norm += float(expected.square().sum())
    return float((error / norm) ** 0.5)


def _attend(query: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Float32 attention of [queries, heads, head_dim], the first at `position`, over [keys, kv_heads, head_dim]."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * SCALE
    query_position = position + torch.arange(len(query), device=query.device)
    hidden = torch.arange(len(keys), device=query.device) > query_position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
