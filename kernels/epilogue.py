"""What the reader of a product does to it first: the norm that was put off until after the product, and the bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Each row of a product times the inverse root mean square of the row it was computed from, plus a bias.

    rms(x) @ W.T = (x @ W.T) * inverse_rms(x), so the norm of a product's input needs no pass over it of its own.
    """

    rows: Tensor | None = None
    """[tokens, size], from which the product was computed. The stride over tokens is free. None: no norm is due."""
    eps: float = 0.0
    """Added to the mean square of a row."""
    bias: Tensor | None = None
    """[columns]."""

    def apply_torch(self, product: Tensor) -> Tensor:
        """[tokens, columns] in float32."""
        values = product.float()
        if self.rows is not None:
            values = values * (self.rows.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return values if self.bias is None else values + self.bias


NO_EPILOGUE = Epilogue()
