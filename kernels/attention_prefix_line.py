"""Places on the line of key tiles that `kernels.attention_prefix_plan` deals out.

A place is a tuple: row of `records`, tile of sequences, key/value head and key tile, counted from the item's last one,
then the first seven words of the row. Plain Triton and Gluon share this: all of it is scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_prefix_plan import RECORD_FIELDS


@triton.jit
def first_place(records: tl.tensor, share: tl.tensor) -> tl.tuple:
    """Where a share begins."""
    index = tl.load(share + 2)
    record = records + index * RECORD_FIELDS
    return (
        index,
        tl.load(share + 3),
        tl.load(share + 4),
        tl.load(share + 5),
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
        tl.load(record + 5),
        tl.load(record + 6),
    )


@triton.jit
def place_after(
    records: tl.tensor, place: tl.tuple, steps: tl.tensor, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tuple:
    """The place `steps` key tiles on, at most the beginning of the next item; after the last one that of zeros."""
    index, sequence_tile, head, tile, tiles, table_row, first_sequence, sequences, first_key, end_key, before = place
    tile += steps
    if tile == tiles:
        tile = tile * 0
        head += 1
        if head == KV_HEADS:
            head = head * 0
            sequence_tile += 1
            if sequence_tile * TOKENS >= sequences:
                sequence_tile = sequence_tile * 0
                index += 1
                record = records + index * RECORD_FIELDS
                tiles = tl.load(record)
                table_row = tl.load(record + 1)
                first_sequence = tl.load(record + 2)
                sequences = tl.load(record + 3)
                first_key = tl.load(record + 4)
                end_key = tl.load(record + 5)
                before = tl.load(record + 6)
    return index, sequence_tile, head, tile, tiles, table_row, first_sequence, sequences, first_key, end_key, before


@triton.jit
def piece_row(
    program: tl.tensor,
    begins: tl.tensor,
    before: tl.tensor,
    member: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The row of `PrefixPieces`, int64, of a sequence's first query head of a key/value head.

    A program has TOKENS * GROUP rows for the item that it goes on with. The piece with which an item `begins` lies
    behind all of those. `before` sequences come before this one in the order of all segments, `member` in the item.
    """
    kept = (PROGRAMS * TOKENS + before.to(tl.int64) * KV_HEADS + head) * GROUP
    return tl.where(begins, kept, (program * TOKENS + member) * GROUP)
