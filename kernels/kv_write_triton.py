"""The K/V write as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_kv_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `kernels.kv_write.write_kv`; the heads of a token must lie one after the other in all four tensors.

    Raises:
        ValueError: a tensor with another layout.
    """
    tokens, num_kv_heads, head_dim = key.shape
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.stride()[-2:] != (head_dim, 1):
            raise ValueError(f"{name} has strides {tensor.stride()}: its last two dimensions must be contiguous")
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"key_cache has strides {key_cache.stride()}, value_cache {value_cache.stride()}: not equal")
    if tokens == 0:
        return
    row = num_kv_heads * head_dim
    _write_kv_kernel[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        BLOCK_SIZE=key_cache.shape[1],
        ROW=row,
        PADDED_ROW=triton.next_power_of_2(row),
    )


@triton.jit
def _write_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PADDED_ROW: tl.constexpr,
) -> None:
    """One program copies one token. Offsets are 64-bit: a cache may hold more than 2^31 elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    element = tl.arange(0, PADDED_ROW)
    inside = element < ROW
    tl.store(key_cache + target + element, tl.load(key + token * key_stride + element, mask=inside), mask=inside)
    tl.store(value_cache + target + element, tl.load(value + token * value_stride + element, mask=inside), mask=inside)
