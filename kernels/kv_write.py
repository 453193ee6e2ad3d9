"""Writing the keys and values of a step's tokens into their cache slots."""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store row `t` of `key` and `value` in slot `slot_mapping[t]` of the caches.

    Args:
        key: [tokens, kv_heads, head_dim], in the dtype of the caches. The stride over tokens is free.
        value: as `key`.
        key_cache: [num_blocks, block_size, kv_heads, head_dim], changed in place.
        value_cache: as `key_cache`.
        slot_mapping: int64 [tokens], block * block_size + offset, none twice. A negative slot writes nowhere.
    """
    if key.is_cuda:
        from kernels.kv_write_triton import write_kv_triton  # Triton is not there without a GPU platform.

        write_kv_triton(key, value, key_cache, value_cache, slot_mapping)
    else:
        _write_kv_torch(key, value, key_cache, value_cache, slot_mapping)


def _write_kv_torch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block = slot_mapping.div(key_cache.shape[1], rounding_mode="floor")
    offset = slot_mapping.remainder(key_cache.shape[1])
    key_cache.index_put_((block, offset), key)
    value_cache.index_put_((block, offset), value)
