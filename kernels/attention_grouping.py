"""When reading shared prefixes once is faster than reading them with every sequence."""

from __future__ import annotations

# Fitted to layers measured with and without grouping on one H200 (benchmarks/results/grouping.jsonl: bfloat16, 1 to 400
# groups of 2 to 1,024): where the rule groups, that is at most 1.5 % slower, and what it leaves to be gained is at
# most 9 %.
_NEAR_BYTES = 16e6
"""Distinct keys and values of shared ranges that stay in the L2 cache between two sequences."""
_NEAR_BYTES_PER_US = 8.5e6
_FAR_BYTES_PER_US = 5.0e6
"""Reads of what another sequence has read before: from that cache, and from memory with a part of it there."""
_PRODUCT_FLOPS_PER_US = 400e6
"""Of the launch that reads the prefixes. Without it, products hide behind reads."""
_LAUNCH_US = 12.0
"""Of that launch, with what the one after it waits for."""
_MERGE_US = 0.009
"""Of a partial result: one for each member of a shared range and key/value head."""


def grouping_pays(
    *, saved_keys: int, distinct_keys: int, members: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> bool:
    """Whether decodes that share `distinct_keys` keys, and so need not read `saved_keys` again, should read them apart.

    `members` counts the sequences of every shared range. Keys and values have `itemsize` bytes an element.
    """
    key_bytes = kv_heads * head_dim * 2 * itemsize
    speed = _NEAR_BYTES_PER_US if distinct_keys * key_bytes < _NEAR_BYTES else _FAR_BYTES_PER_US
    reads = saved_keys * key_bytes / speed
    products = saved_keys * heads * head_dim * 4 / _PRODUCT_FLOPS_PER_US
    return reads > _LAUNCH_US + products + members * kv_heads * _MERGE_US
