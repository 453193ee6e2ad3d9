"""What a decoder makes of the weights of a checkpoint."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_PROJECTION = re.compile(r"(model\.layers\.\d+)\.(self_attn\.[qkv]_proj|mlp\.(?:gate|up)_proj)\.weight")


def folded(stored: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a checkpoint in `dtype`, as a decoder holds them whose norms are deferred.

    Dense projections that follow a norm have its weight in their columns.
    """
    held = {name: tensor.to(dtype) for name, tensor in stored.items()}
    for name in held:
        if match := _PROJECTION.fullmatch(name):
            layer, projection = match.groups()
            norm = "input_layernorm" if projection.startswith("self_attn") else "post_attention_layernorm"
            factor = stored[f"{layer}.{norm}.weight"].to(dtype).float()
            held[name] = (stored[name].to(dtype).float() * factor).to(dtype)
    return held
