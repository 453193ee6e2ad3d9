"""Copies between a device and page-locked memory of the host, made by a kernel of the device.

A copy engine hands over to kernels and back: two copies around the graph of a step take 18 us, as nodes of it 15, and
as kernels of it 5.
"""

from __future__ import annotations

from torch import Tensor


def copy_page_locked(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target` on the current stream, bytes whatever the dtypes.

    Either may lie in the host's memory: then it must be page-locked, and stay as it is until the copy is over. A CUDA
    graph may hold the copy. Where both are CPU tensors, torch copies them.

    Raises:
        ValueError: tensors that are not contiguous, or whose bytes differ or are no multiple of 4.
    """
    length = target.numel() * target.element_size()
    if length != source.numel() * source.element_size() or length % 4:
        raise ValueError(f"{target.dtype} {list(target.shape)} and {source.dtype} {list(source.shape)}: other bytes")
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(f"strides {target.stride()} and {source.stride()}: both must be contiguous")
    if target.is_cuda or source.is_cuda:
        from kernels.page_locked_triton import copy_page_locked_triton  # Triton is not there without a GPU platform.

        copy_page_locked_triton(target, source)
    else:
        target.view(-1).copy_(source.view(-1).view(target.dtype))
