"""Epilogues for the tests of the kernels that apply them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.epilogue import Epilogue

EPS = 1e-5


def make_epilogue(
    tokens: int, columns: int, row_size: int, bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> Epilogue:
    """Random rows [tokens, row_size], parts of longer ones, of which some are large and some small; a random bias.

    Without rows if `row_size` is 0.
    """
    generator = torch.Generator(device).manual_seed(5)
    sizes = 10.0 ** torch.linspace(-1, 1, tokens, device=device)[:, None]
    rows = torch.randn(tokens, row_size + 16, generator=generator, device=device) * sizes
    values = torch.randn(columns, generator=generator, device=device)
    return Epilogue(
        rows=rows.to(dtype)[:, :row_size] if row_size else None, eps=EPS, bias=values.to(dtype) if bias else None
    )


def applied(epilogue: Epilogue, product: Tensor) -> Tensor:
    """The product after its epilogue, in float32."""
    values = product.float()
    if epilogue.rows is not None:
        rows = epilogue.rows.float()
        values = values / ((rows * rows).sum(1, keepdim=True) / rows.shape[1] + epilogue.eps).sqrt()
    if epilogue.bias is not None:
        values = values + epilogue.bias.float()
    return values
