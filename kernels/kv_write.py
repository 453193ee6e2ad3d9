"""What lies between a layer's query, key and value product and its attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.epilogue import NO_EPILOGUE, Epilogue
from kernels.norm import rms_norm_torch
from kernels.rope import rotate_torch


@dataclass(frozen=True)
class HeadNorms:
    """Norms over each query head and each key head."""

    query: Tensor
    """[head_dim]: weight."""
    key: Tensor
    """[head_dim]: weight."""
    eps: float


def rotate_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    """Norm and rotate queries in place; norm and rotate keys, and write them and the values into their slots.

    Keys and values of row `t` go into slot `slot_mapping[t]` of the caches; those in `qkv` stay as they are.
    All is computed in float32 and rounded once.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], in the dtype of the caches: of each token the queries,
            the keys, the values. The stride over tokens is free.
        cos: [tokens, head_dim / 2] in the dtype of `qkv`, as `kernels.rope.rotary_cos_sin` makes it.
        sin: as `cos`.
        key_cache: [num_blocks, block_size, kv_heads, head_dim], changed in place.
        value_cache: as `key_cache`.
        slot_mapping: int64 [tokens], block * block_size + offset, none twice. A negative slot writes nowhere.
        norms: applied to query and key heads before they are rotated.
        epilogue: of the product `qkv`, applied before all else.

    Returns:
        The queries [tokens, heads, head_dim], a view of `qkv`.

    Raises:
        ValueError: on a GPU, a tensor with another layout than its kernel reads.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    kv_size = kv_heads * head_dim
    sizes = [qkv.shape[1] - 2 * kv_size, kv_size, kv_size]
    result = qkv[:, : sizes[0]].unflatten(1, (-1, head_dim))
    if qkv.is_cuda:
        from kernels.kv_write_triton import rotate_and_write_kv_triton  # Triton is not there without a GPU platform.

        rotate_and_write_kv_triton(qkv, cos, sin, key_cache, value_cache, slot_mapping, norms, epilogue)
        return result
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in epilogue.apply_torch(qkv).split(sizes, dim=1))
    if norms is not None:
        query, key = rms_norm_torch(query, norms.query, norms.eps), rms_norm_torch(key, norms.key, norms.eps)
    _write_kv_torch(rotate_torch(key, cos, sin), value, key_cache, value_cache, slot_mapping)
    return result.copy_(rotate_torch(query, cos, sin))


def _write_kv_torch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block = slot_mapping.div(key_cache.shape[1], rounding_mode="floor")
    offset = slot_mapping.remainder(key_cache.shape[1])
    key_cache.index_put_((block, offset), key.to(key_cache.dtype))
    value_cache.index_put_((block, offset), value.to(value_cache.dtype))
