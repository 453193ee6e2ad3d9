"""The gate of a gated MLP (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from kernels.epilogue import NO_EPILOGUE, Epilogue


def silu_and_mul(gate_up: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    """silu(gate) * up, [tokens, inner] in the dtype of `gate_up`, computed in float32 and rounded once.

    Args:
        gate_up: [tokens, 2 * inner], the gates of a token before its ups. The stride over tokens is free.
        epilogue: of the product `gate_up`, applied before.

    Raises:
        ValueError: on a GPU, rows that are not contiguous.
    """
    if gate_up.is_cuda:
        from kernels.activation_triton import silu_and_mul_triton  # Triton is not there without a GPU platform.

        return silu_and_mul_triton(gate_up, epilogue)
    gate, up = epilogue.apply_torch(gate_up).chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
