"""Attention problems shared by the CPU and the GPU tests: poisoned caches, shuffled blocks, strided queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.attention_batch import PREFIX_LEVELS, AttentionBatch, SharedPrefixes
from kernels.reference import reference_attention
from tests.errors import relative_error

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 5, 6, 7, 8, 16)
BLOCK_SIZES = (16, 32, 64, 128, 256)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}
"""Largest relative error (Frobenius norm) against float32: for half types, rounding of weights and output."""
UNUSED_BLOCK_ID = 2**31 - 1
POISON = (float("nan"), float("inf"))


Segment = tuple[int, int, int, int]
"""First sequence, number of sequences, first key, key after the last: keys that the sequences share."""


@dataclass(frozen=True)
class Case:
    """Query and context length of each sequence, the model's shape, the padding (so many sequences and tokens), and
    what sequences share, parents first."""

    lengths: tuple[tuple[int, int], ...]
    head_dim: int = 64
    group: int = 3
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    kv_heads: int = 2
    padding: int = 0
    segments: tuple[Segment, ...] = ()

    @property
    def query_lens(self) -> list[int]:
        return [query for query, _ in self.lengths]

    @property
    def context_lens(self) -> list[int]:
        return [context for _, context in self.lengths]


def nested_case(block_size: int = 16, **shape: Any) -> Case:
    """Decodes of which some share a prefix: sequences with none before, between and after two groups, the first of
    three levels and with more rows than a tile, and padding."""
    scale = max(block_size // 64, 1)
    lengths = [5, *(1400 + 7 * row for row in range(45)), 40, 1290, 1297, 33]
    groups = [(1, 45, 0, 512), (1, 30, 512, 768), (3, 20, 768, 1280), (40, 5, 512, 1280), (47, 2, 0, 1024)]
    return Case(
        tuple((1, length * scale) for length in lengths),
        block_size=block_size,
        segments=tuple((first, count, key * scale, end * scale) for first, count, key, end in groups),
        padding=2,
        **shape,
    )


@dataclass(frozen=True)
class Inputs:
    """Arguments of `paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    scale: float
    window: int | None

    @property
    def tables(self) -> Tensor:
        """int32 [sequences, max_blocks]: the block table of each sequence."""
        return self.batch.block_tables[self.batch.table_rows]

    def run(self, attention: Callable[..., Tensor]) -> Tensor:
        """Outputs of the tokens that are not padding."""
        output = attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.batch,
            scale=self.scale,
            sliding_window=self.window,
        )
        return output[: int(self.batch.query_start[-1])]

    def fill(self, output: Tensor, attention: Callable[..., None]) -> None:
        """Let a kernel for some of the sequences write its tokens into `output`."""
        attention(
            output,
            self.query,
            self.key_cache,
            self.value_cache,
            self.batch,
            scale=self.scale,
            sliding_window=self.window,
        )

    def filled(self, attention: Callable[..., None]) -> Tensor:
        """Outputs of all tokens, NaN where `attention` writes none."""
        output = torch.full(self.query.shape, float("nan"), dtype=self.query.dtype, device=self.query.device)
        self.fill(output, attention)
        return output


def make_inputs(
    case: Case, device: str = "cpu", *, poison: tuple[float, float] = POISON, unused_id: int = UNUSED_BLOCK_ID
) -> Inputs:
    """The same tensors for the same case, whatever fills the slots and table entries that are not used.

    Block 0 and one row of the block tables belong to no sequence, and the rows do not come in the order of the
    sequences. The query is a slice of a wider tensor, as it is of a fused projection; its padding is NaN.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    used = [-(-context // case.block_size) for context in case.context_lens]
    num_blocks = 1 + sum(used)
    host_generator = torch.Generator().manual_seed(0)
    ids = 1 + torch.randperm(num_blocks - 1, generator=host_generator)
    *rows, unused_row = torch.randperm(len(used) + 1, generator=host_generator).tolist()
    tables = torch.full((len(used) + 1, max(used) + 1), unused_id, dtype=torch.int32)
    for row, mine in zip(rows, ids.split(used), strict=True):
        tables[row, : len(mine)] = mine
    for first, count, first_key, end_key in case.segments:
        blocks = slice(first_key // case.block_size, end_key // case.block_size)
        tables[rows[first : first + count], blocks] = tables[rows[first], blocks]
    tables = tables.to(device)

    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    caches = [torch.full(shape, fill, dtype=case.dtype, device=device) for fill in poison]
    for row, context in zip(rows, case.context_lens, strict=True):
        position = torch.arange(context, device=device)
        block, offset = tables[row, position // case.block_size].long(), position % case.block_size
        for cache in caches:
            cache[block, offset] = normal(context, case.kv_heads, case.head_dim)

    heads = case.group * case.kv_heads
    fused = normal(sum(case.query_lens) + case.padding, heads + 2 * case.kv_heads, case.head_dim)
    fused[sum(case.query_lens) :] = float("nan")
    padding = [0] * case.padding
    batch = make_batch(
        tables, case.query_lens + padding, case.context_lens + padding, rows + [unused_row] * case.padding
    )
    if case.segments:
        batch = replace(batch, prefixes=make_prefixes(case.segments, batch))
    return Inputs(
        query=fused[:, :heads],
        key_cache=caches[0],
        value_cache=caches[1],
        batch=batch,
        scale=case.head_dim**-0.5,
        window=case.window,
    )


def make_batch(
    block_tables: Tensor, query_lens: list[int], context_lens: list[int], table_rows: list[int] | None = None
) -> AttentionBatch:
    """With exact bounds; without `table_rows`, sequence `s` has row `s` of the tables."""
    device = block_tables.device
    rows = range(len(query_lens)) if table_rows is None else table_rows
    return AttentionBatch(
        block_tables=block_tables,
        table_rows=torch.tensor([*rows], dtype=torch.int32, device=device),
        query_start=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


def make_prefixes(segments: Sequence[Segment], batch: AttentionBatch, *, capacity: int | None = None) -> SharedPrefixes:
    """Every second record is padding, and so is what `capacity` leaves."""
    records = torch.zeros(capacity or 2 * len(segments) + 1, 5, dtype=torch.int32)
    own_start = torch.zeros(batch.num_sequences, dtype=torch.int32)
    own_segments = torch.full((batch.num_sequences, PREFIX_LEVELS), -1, dtype=torch.int32)
    table_rows = batch.table_rows.tolist()
    for index, (first, count, first_key, end_key) in enumerate(segments):
        records[2 * index] = torch.tensor([table_rows[first + count - 1], first, count, first_key, end_key])
        for sequence in range(first, first + count):
            assert own_start[sequence] == first_key
            own_start[sequence] = end_key
            own_segments[sequence, int((own_segments[sequence] >= 0).sum())] = 2 * index
    device = batch.context_lens.device
    return SharedPrefixes(records.to(device), own_start.to(device), own_segments.to(device))


def case_error(case: Case, attention: Callable[..., Any], device: str = "cpu") -> float:
    """Relative error of `attention` against the float32 reference."""
    inputs = make_inputs(case, device)
    return relative_error(inputs.run(attention), inputs.run(reference_attention))
