"""Copying weights from mapped files to a device."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

_CHUNK_BYTES = 16 << 20  # large enough for full bus speed, small enough that reading and sending overlap
_THREADS = 8  # one thread copies from the page cache at a fraction of the bus's speed


class WeightCopy:
    """Copies tensors of mapped files to one device, for the length of a `with` block.

    To a GPU they go through pinned buffers: each of several threads fills one of its two buffers from the
    page cache while the other is on its way, so that reading and sending overlap. The dtype is converted on
    the GPU.
    """

    def __init__(self, device: torch.device, *, threads: int = _THREADS, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._lanes = threading.local()
        self._pool = ThreadPoolExecutor(threads, "weight-copy") if device.type == "cuda" else None

    def __enter__(self) -> WeightCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def copy(self, weights: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fill each target, contiguous on the device, from its source of the same shape on the host.

        Returns when the targets hold the values, so the sources may be unmapped afterwards.
        """
        if self._pool is None:
            for target, source in weights:
                target.copy_(source)
            return
        torch.cuda.synchronize(self._device)  # what used the targets' memory before is over
        for sent in list(self._pool.map(self._send, chunks(weights, self._chunk_bytes))):
            sent.synchronize()

    def _send(self, chunk: tuple[Tensor, Tensor]) -> torch.cuda.Event:
        if not hasattr(self._lanes, "own"):
            self._lanes.own = _Lane(self._device, self._chunk_bytes)
        return self._lanes.own.send(*chunk)


def chunks(weights: Iterable[tuple[Tensor, Tensor]], chunk_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each target and source, cut into flat pieces whose source has at most `chunk_bytes` bytes."""
    for target, source in weights:
        elements = chunk_bytes // source.element_size()
        yield from zip(target.view(-1).split(elements), source.reshape(-1).split(elements), strict=True)


class _Lane:
    """A thread's own stream and its two pinned buffers, used in turn."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]

    def send(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Start the copy of one chunk; the event is recorded behind it."""
        buffer, sent = self._buffers[0], self._sent[0]
        self._buffers.reverse()
        self._sent.reverse()
        sent.synchronize()
        staged = buffer[: source.nbytes]
        # NumPy's copy is one memcpy outside the interpreter lock; torch's would start threads of its own.
        np.copyto(staged.numpy(), source.view(torch.uint8).numpy())
        with torch.cuda.stream(self._stream):
            target.copy_(staged.view(source.dtype).to(target.device, non_blocking=True))
            sent.record()
        return sent
