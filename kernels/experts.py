"""The MLPs of a mixture of experts, each over the tokens that chose it."""

from __future__ import annotations

from torch import Tensor

from kernels.experts_torch import mix_experts_torch
from kernels.routing import Routing


def mix_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *, residual: Tensor | None = None
) -> Tensor:
    """The weighted sum of each token's experts, [tokens, hidden] in the dtype of `hidden`; zero for padding.

    An expert computes down(silu(gate(x)) * up(x)). The sum runs in float32 and in the order of a token's
    choices, so the order of pairs in the routing changes nothing. Nothing is read of experts without tokens.
    CUDA tensors are computed by Triton kernels, which neither wait for the device nor need to know the
    counts, so a CUDA graph may hold them; CPU tensors by torch.

    Args:
        hidden: [tokens, hidden]. The stride over tokens is free.
        gate_up: [experts, 2 * inner, hidden], contiguous, in the dtype of `hidden`: the gate's rows, then up's.
        down: [experts, hidden, inner], contiguous, in the dtype of `hidden`.
        routing: of these tokens.
        residual: contiguous, like the result: the sum is added to it in place, and it is the result.

    Raises:
        ValueError: on a GPU, tensors whose layout, sizes or dtypes the kernels cannot read.
    """
    if hidden.is_cuda:
        from kernels.experts_triton import mix_experts_triton  # Triton is not there without a GPU platform.

        return mix_experts_triton(hidden, gate_up, down, routing, residual=residual)
    return mix_experts_torch(hidden, gate_up, down, routing, residual=residual)
