"""How the next token of each row is chosen, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingSettings:
    """Sampling settings of the rows of a step, on the device of their logits; tensors of [rows] unless said otherwise.

    A captured graph is replayed with other settings than it was captured with: only `filtered` and the shapes
    are fixed.
    """

    temperature: Tensor
    """float32: 0 is greedy, which ignores the filters and the noise."""
    top_p: Tensor
    """float32: the best tokens that together hold this share of the probability are kept; 1 keeps all."""
    top_k: Tensor
    """int32: so many best tokens are kept; 0 keeps all."""
    min_p: Tensor
    """float32: tokens less likely than this share of the likeliest are dropped; 0 keeps all."""
    keys: Tensor
    """int32 [rows, 2]: keys of the noise."""
    suppressed: Tensor
    """int32 [pairs, 2]: (row, token id) that must not be drawn. A pair out of range is padding."""
    filtered: bool
    """Whether any row has a `top_p`, `top_k` or `min_p`; if False, all three are ignored."""
