"""Drawing the next token of every row from its logits."""

from __future__ import annotations

from torch import Tensor

from kernels.sampling_settings import SamplingSettings
from kernels.sampling_torch import sample_tokens_torch

__all__ = ["SamplingSettings", "sample_tokens"]


def sample_tokens(logits: Tensor, settings: SamplingSettings, *, out: Tensor, places: Tensor | None = None) -> None:
    """Draw one token per row, or -1 where a row's logits are not finite.

    Temperature comes first, then top-k, top-p over what top-k kept, and min-p over the whole, as in
    transformers; tokens that tie with the last one kept are kept, too. The draw is the Gumbel-max trick, made
    twice: the first draws a group of neighbouring tokens by their probabilities' sum, the second one of its tokens,
    so that a large vocabulary needs noise for its groups and the tokens of one. Noise is a pure function of the id
    of the group or the token and of its row's keys, so that no other row, batch or device changes a draw but by
    rounding. Greedy rows take the best token, the first of equals. If all tokens of a row are suppressed, any may
    come.

    CUDA tensors are computed by Triton kernels that neither sort nor wait for the host and can be captured
    in a graph, CPU tensors by torch.

    Args:
        logits: bfloat16, float16 or float32 [rows, vocab]; may be overwritten. Rows are contiguous, at any stride.
        settings: of the rows.
        out: int32 for the draws.
        places: int64 [rows], where in `out` the draw of each row goes; None: in the order of rows.

    Raises:
        ValueError: logits whose rows are not contiguous.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: rows must be contiguous")
    if logits.is_cuda:
        from kernels.sampling_triton import sample_tokens_triton  # Triton is not there without a GPU platform.

        sample_tokens_triton(logits, settings, out=out, places=places)
    else:
        sample_tokens_torch(logits, settings, out=out, places=places)
