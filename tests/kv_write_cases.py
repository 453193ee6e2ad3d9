"""Problems shared by the CPU and the GPU tests of the rotation and K/V write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.epilogue import Epilogue
from kernels.kv_write import HeadNorms
from kernels.rope import rotary_cos_sin
from tests.epilogue_cases import applied, make_epilogue
from tests.errors import relative_error

BLOCK_SIZE = 16
SPARE_BLOCKS = 8
UNWRITTEN = 7.0
EPS = 1e-6
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
"""Largest relative error (Frobenius norm) against float32: one rounding; for float32 itself, approximate roots."""


@dataclass(frozen=True)
class Case:
    """Sizes of a problem."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    normed: bool = False
    tokens: int = 9
    row_size: int = 0
    """Of the rows whose norm was put off; 0: none was."""
    bias: bool = False


@dataclass(frozen=True)
class Inputs:
    """Arguments of `rotate_and_write_kv`."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    norms: HeadNorms | None
    epilogue: Epilogue

    def run(self, write: Callable[..., Tensor | None]) -> None:
        caches = (self.key_cache, self.value_cache)
        write(self.qkv, self.cos, self.sin, *caches, self.slot_mapping, norms=self.norms, epilogue=self.epilogue)

    def heads(self, *, after_epilogue: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the query, key and value heads [tokens, heads, head_dim]; in float32 after their epilogue."""
        kv_heads, head_dim = self.key_cache.shape[2:]
        qkv = applied(self.epilogue, self.qkv) if after_epilogue else self.qkv.clone()
        return qkv.unflatten(1, (-1, head_dim)).tensor_split((-2 * kv_heads, -kv_heads), dim=1)


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Random rows of a wider tensor, positions near and far, and different slots in no order.

    The caches hold a value that no row holds.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    positions = torch.randint(100_000, (case.tokens,), generator=generator, device=device)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, case.head_dim // 2, device=device)
    cos, sin = rotary_cos_sin(positions, frequencies, 1.0, case.dtype)
    cache = (case.tokens // BLOCK_SIZE + SPARE_BLOCKS, BLOCK_SIZE, case.kv_heads, case.head_dim)
    return Inputs(
        qkv=normal(case.tokens, width + 32)[:, :width],
        cos=cos,
        sin=sin,
        key_cache=torch.full(cache, UNWRITTEN, dtype=case.dtype, device=device),
        value_cache=torch.full(cache, UNWRITTEN, dtype=case.dtype, device=device),
        slot_mapping=torch.randperm(cache[0] * BLOCK_SIZE, generator=generator, device=device)[: case.tokens],
        norms=HeadNorms(normal(case.head_dim), normal(case.head_dim), EPS) if case.normed else None,
        epilogue=make_epilogue(case.tokens, width, case.row_size, case.bias, case.dtype, device),
    )


def reference_heads(heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Normed and rotated heads [tokens, heads, head_dim] in float32."""
    heads = heads.float()
    if weight is not None:
        heads = heads * (heads.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def check(case: Case, write: Callable[..., Tensor | None], device: str = "cpu") -> None:
    """Assert that queries, keys and values come out right and that nothing else is written."""
    inputs = make_inputs(case, device)
    inputs.slot_mapping[::7] = -1  # trap 22
    _, key, value = inputs.heads()
    query_after, key_after, value_after = inputs.heads(after_epilogue=True)
    query_weight = inputs.norms.query if inputs.norms else None
    key_weight = inputs.norms.key if inputs.norms else None
    expected_query = reference_heads(query_after, query_weight, inputs.cos, inputs.sin)
    expected_key = reference_heads(key_after, key_weight, inputs.cos, inputs.sin)
    inputs.run(write)

    rotated, same_key, same_value = inputs.heads()
    assert relative_error(rotated, expected_query) < TOLERANCE[case.dtype]
    assert torch.equal(same_key, key)
    assert torch.equal(same_value, value)

    written = inputs.slot_mapping >= 0
    slots = inputs.slot_mapping[written]
    others = torch.ones(inputs.key_cache.shape[:2].numel(), dtype=torch.bool, device=device)
    others[slots] = False
    keys, values = inputs.key_cache.flatten(0, 1), inputs.value_cache.flatten(0, 1)
    assert relative_error(keys[slots], expected_key[written]) < TOLERANCE[case.dtype]
    assert relative_error(values[slots], value_after[written]) < TOLERANCE[case.dtype]
    if case.row_size == 0 and not case.bias:
        assert torch.equal(values[slots], value[written])
    assert bool((keys[others] == UNWRITTEN).all())
    assert bool((values[others] == UNWRITTEN).all())
