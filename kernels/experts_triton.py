"""A mixture of experts as two grouped products and a weighted sum, each a Triton kernel.

A program computes a tile of one expert's rows; which expert and rows those are it finds from the counts on
the device. So a launch has as many programs as the number of pairs may need at most, and the host waits for
nothing. The rows of all experts lie behind one another between the products, without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class _Tile:
    """Shape of one program's work; sizes are powers of two that fit the 227 KiB of shared memory of an H100.

    `columns` are outputs; `depth` is the part of the summed dimension that one pipeline stage loads.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By rows; of 44 shapes, each within 5 % of the fastest for 8 to 8,192 tokens on an H200, with 128 experts of
# 2,048 x 768, 8 a token, in bfloat16. Up to 64 rows the time is that of reading the weights (from 32 to 512 tokens
# about 4.1 TB/s for gate and up, 3.9 for down); at 8,192 tokens the products reach about 550 and 470 TFLOP/s.
_GATE_UP_TILES = {
    16: _Tile(rows=16, columns=32, depth=128, warps=4, stages=4),
    32: _Tile(rows=32, columns=64, depth=128, warps=4, stages=3),
    64: _Tile(rows=64, columns=64, depth=64, warps=4, stages=4),
    128: _Tile(rows=128, columns=128, depth=64, warps=8, stages=4),
}
_DOWN_TILES = {
    16: _Tile(rows=16, columns=128, depth=128, warps=4, stages=3),
    32: _Tile(rows=32, columns=128, depth=64, warps=4, stages=4),
    64: _Tile(rows=64, columns=128, depth=64, warps=4, stages=4),
    128: _Tile(rows=128, columns=128, depth=64, warps=8, stages=3),
}
_FLOAT32_TILE = _Tile(rows=16, columns=32, depth=32, warps=4, stages=1)
"""IEEE float32 products have no tensor cores: the operands lie in registers, and a larger tile would spill them."""
_SUM_COLUMNS = 2048
"""Elements of a token that one program sums, 16 for each thread of four warps."""


def mix_experts_triton(
    hidden: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *, residual: Tensor | None = None
) -> Tensor:
    """As `kernels.experts.mix_experts`, for CUDA tensors (CPU tensors under Triton's interpreter).

    Raises:
        ValueError: tensors whose layout, sizes or dtypes the kernels cannot read.
    """
    _check_layout(hidden, gate_up, down, routing, residual)
    if not len(hidden):
        return torch.empty_like(hidden) if residual is None else residual
    gate_up_tile, down_tile = _choose_tiles(hidden.dtype, routing.weights.numel(), len(routing.counts))
    activated = _gate_up(hidden, gate_up, routing, gate_up_tile)
    return _weighted_sum(_down(activated, down, routing, down_tile), routing.weights, residual)


def _choose_tiles(dtype: torch.dtype, pairs: int, experts: int) -> tuple[_Tile, _Tile]:
    """Tiles for both products. Rows are twice the mean of an expert's: few experts then need a second tile,
    which would read their weights again, and no tile is mostly padding."""
    if dtype == torch.float32:
        return _FLOAT32_TILE, _FLOAT32_TILE
    rows = min(max(_GATE_UP_TILES), max(min(_GATE_UP_TILES), triton.next_power_of_2(2 * pairs // experts)))
    return _GATE_UP_TILES[rows], _DOWN_TILES[rows]


def _most_tiles(pairs: int, experts: int, rows: int) -> int:
    """The most tiles of `rows` rows that `pairs` pairs can need: each touched expert has one with a single row."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // rows


def _gate_up(hidden: Tensor, gate_up: Tensor, routing: Routing, tile: _Tile) -> Tensor:
    """silu(gate(x)) * up(x) of every pair, [pairs, inner], expert by expert."""
    choices, experts = routing.weights.shape[1], len(routing.counts)
    pairs, inner = routing.weights.numel(), gate_up.shape[1] // 2
    output = torch.empty(pairs, inner, dtype=hidden.dtype, device=hidden.device)
    _gate_up_kernel[(_most_tiles(pairs, experts, tile.rows) * triton.cdiv(inner, tile.columns),)](
        output,
        hidden,
        gate_up,
        routing.pairs,
        routing.counts,
        routing.pairs.stride(0),
        hidden.stride(0),
        HIDDEN=hidden.shape[1],
        INNER=inner,
        EXPERTS=experts,
        PADDED_EXPERTS=triton.next_power_of_2(experts),
        CHOICES=choices,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return output


def _down(activated: Tensor, down: Tensor, routing: Routing, tile: _Tile) -> Tensor:
    """The experts' outputs, [pairs, hidden], in the order of pairs; unset for pairs of padding tokens."""
    experts, hidden, inner = down.shape
    pairs = len(activated)
    output = torch.empty(pairs, hidden, dtype=activated.dtype, device=activated.device)
    _down_kernel[(_most_tiles(pairs, experts, tile.rows) * triton.cdiv(hidden, tile.columns),)](
        output,
        activated,
        down,
        routing.pairs,
        routing.counts,
        routing.pairs.stride(0),
        HIDDEN=hidden,
        INNER=inner,
        EXPERTS=experts,
        PADDED_EXPERTS=triton.next_power_of_2(experts),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return output


def _weighted_sum(products: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """[tokens, hidden]: the sum of each token's [choices, hidden] and, if there is one, the residual, in place.

    Those with a weight of 0 are not read.
    """
    tokens, choices = weights.shape
    hidden = products.shape[1]
    output = residual
    if output is None:
        output = torch.empty(tokens, hidden, dtype=products.dtype, device=products.device)
    columns = min(_SUM_COLUMNS, triton.next_power_of_2(hidden))
    _weighted_sum_kernel[(tokens, triton.cdiv(hidden, columns))](
        output, products, weights,
        HIDDEN=hidden, CHOICES=choices, COLUMNS=columns, RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return output


def _check_layout(hidden: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, residual: Tensor | None) -> None:
    experts, size, inner = down.shape
    if gate_up.shape != (experts, 2 * inner, size) or hidden.shape[1] != size or len(routing.counts) != experts:
        raise ValueError(
            f"hidden {list(hidden.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)} and "
            f"{len(routing.counts)} routed experts do not fit together"
        )
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, gate_up {gate_up.dtype}, down {down.dtype}: they must be equal")
    if hidden.stride(1) != 1 or not gate_up.is_contiguous() or not down.is_contiguous():
        raise ValueError("rows of hidden, gate_up and down must be contiguous")
    if residual is not None and (residual.shape != hidden.shape or not residual.is_contiguous()):
        raise ValueError(f"residual {list(residual.shape)} must be like hidden {list(hidden.shape)} and contiguous")


# The stride of pairs is the number of tokens: specialised on, it would compile the kernels again and again.
@triton.jit(do_not_specialize=["pairs_stride"])
def _gate_up_kernel(
    output: tl.tensor,
    hidden: tl.tensor,
    gate_up: tl.tensor,
    pairs: tl.tensor,
    counts: tl.tensor,
    pairs_stride: tl.tensor,
    hidden_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program computes a tile of one expert.

    The tile's gate and up rows alternate: one product computes both, and a thread holds both of a column.
    """
    COLUMN_TILES: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    expert, row_tile, column_tile, count, start = _find_tile(counts, COLUMN_TILES, EXPERTS, PADDED_EXPERTS, ROWS)
    if expert >= EXPERTS:
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    within = row < count
    pair = tl.load(pairs + expert.to(tl.int64) * pairs_stride + row, mask=within, other=0)
    rows = hidden + (pair // CHOICES).to(tl.int64)[:, None] * hidden_stride
    first_column = column_tile * COLUMNS
    both = tl.arange(0, 2 * COLUMNS)
    # Columns beyond the last repeat it; they are not stored.
    weight_row = both % 2 * INNER + tl.minimum(first_column + both // 2, INNER - 1)
    weights = gate_up + expert.to(tl.int64) * (2 * INNER * HIDDEN) + weight_row[:, None] * HIDDEN
    product = _product(rows, weights, within, HIDDEN, ROWS, 2 * COLUMNS, DEPTH, STAGES)

    gate, up = tl.split(tl.reshape(product.to(output.dtype.element_ty), (ROWS, COLUMNS, 2)))
    gate = gate.to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty)
    column = first_column + tl.arange(0, COLUMNS)
    target = output + (start + row).to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, silu * up, mask=within[:, None] & (column < INNER)[None, :])


@triton.jit(do_not_specialize=["pairs_stride"])
def _down_kernel(
    output: tl.tensor,
    activated: tl.tensor,
    down: tl.tensor,
    pairs: tl.tensor,
    counts: tl.tensor,
    pairs_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program computes a tile of one expert and stores its rows at the places of their pairs."""
    COLUMN_TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    expert, row_tile, column_tile, count, start = _find_tile(counts, COLUMN_TILES, EXPERTS, PADDED_EXPERTS, ROWS)
    if expert >= EXPERTS:
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    within = row < count
    rows = activated + (start + row).to(tl.int64)[:, None] * INNER
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = tl.minimum(column, HIDDEN - 1)
    weights = down + expert.to(tl.int64) * (HIDDEN * INNER) + weight_row[:, None] * INNER
    product = _product(rows, weights, within, INNER, ROWS, COLUMNS, DEPTH, STAGES)

    pair = tl.load(pairs + expert.to(tl.int64) * pairs_stride + row, mask=within, other=0)
    target = output + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, product.to(output.dtype.element_ty), mask=within[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def _find_tile(
    counts: tl.tensor,
    COLUMN_TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The program's tile: its expert, its place among the expert's tiles of rows and of columns, how many rows
    the expert has, and how many all experts before it have. Beyond the last tile, an expert that does not exist.

    Neighbouring programs compute the same columns of an expert, so its weights are read from memory once.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) <= program // COLUMN_TILES
    found = tl.sum(before.to(tl.int32), 0)
    start = tl.sum(tl.where(before, count, 0), 0)
    own = tl.sum(tl.where(expert == found, count, 0), 0)
    place = program - tl.sum(tl.where(before, tiles, 0), 0) * COLUMN_TILES
    row_tiles = tl.maximum((own + ROWS - 1) // ROWS, 1)
    return found, place % row_tiles, place // row_tiles, own, start


@triton.jit
def _product(
    rows: tl.tensor,
    weights: tl.tensor,
    within: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """rows @ weights.T over SIZE elements, float32 [ROWS, COLUMNS]; both are pointers to rows, [.., 1].

    Rows that are not `within` are not read.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        element = at + tl.arange(0, DEPTH)[None, :]
        if SIZE % DEPTH == 0:
            row_part = tl.load(rows + element, mask=within[:, None], other=0.0)
            weight_part = tl.load(weights + element)
        else:
            inside = element < SIZE
            row_part = tl.load(rows + element, mask=within[:, None] & inside, other=0.0)
            weight_part = tl.load(weights + element, mask=inside, other=0.0)
        # Float32 products would be TF32 by default.
        total = tl.dot(row_part, tl.trans(weight_part), total, input_precision="ieee")
    return total


@triton.jit
def _weighted_sum_kernel(
    output: tl.tensor,
    products: tl.tensor,
    weights: tl.tensor,
    HIDDEN: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """One program sums one token. With RESIDUAL, `output` holds what the sum is added to."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = output + token * HIDDEN + column
    total = tl.zeros((COLUMNS,), tl.float32)
    if RESIDUAL:
        total = tl.load(to, mask=column < HIDDEN, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        weight = tl.load(weights + pair)
        read = column < tl.where(weight != 0, HIDDEN, 0)
        total += weight * tl.load(products + pair * HIDDEN + column, mask=read, other=0.0).to(tl.float32)
    tl.store(to, total.to(output.dtype.element_ty), mask=column < HIDDEN)
