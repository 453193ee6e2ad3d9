"""Buffers in shared memory that one warp group, the producer, fills and others, the consumers, use up in turn."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

# Triton 3.9 gave these functions other names.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the program."""
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Start to copy from global to shared memory; what the mask leaves out becomes 0."""

_PRODUCER_THREADS = gl.constexpr(128)


@gluon.jit
def make_ring(
    DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, CONSUMERS: gl.constexpr
) -> tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor, gl.shared_memory_descriptor]:
    """SHAPE[0] buffers of SHAPE[1:], with barriers that say which are filled and which are used up.

    The buffers are filled in turn: filling `n` goes into buffer `n % SHAPE[0]`.
    """
    buffers = gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT)
    BUFFERS: gl.constexpr = SHAPE[0]
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(index), count=_PRODUCER_THREADS)
        mbarrier.init(empty.index(index), count=CONSUMERS)
    return buffers, ready, empty


@gluon.jit
def await_empty(ring: gl.tuple, n: gl.tensor) -> gl.shared_memory_descriptor:
    """The buffer for filling `n`, once all consumers have released what was in it."""
    buffers, _, empty = ring
    BUFFERS: gl.constexpr = buffers.shape[0]
    mbarrier.wait(empty.index(n % BUFFERS), (n // BUFFERS & 1) ^ 1)
    return buffers.index(n % BUFFERS)


@gluon.jit
def announce(ring: gl.tuple, n: gl.tensor) -> None:
    """Let filling `n` count as ready as soon as the copies that the producer has started have ended."""
    buffers, ready, _ = ring
    BUFFERS: gl.constexpr = buffers.shape[0]
    async_copy.mbarrier_arrive(ready.index(n % BUFFERS), increment_count=False)


@gluon.jit
def await_ready(ring: gl.tuple, n: gl.tensor) -> gl.shared_memory_descriptor:
    """The buffer of filling `n`, once it is there."""
    buffers, ready, _ = ring
    BUFFERS: gl.constexpr = buffers.shape[0]
    mbarrier.wait(ready.index(n % BUFFERS), n // BUFFERS & 1)
    fence_async_shared()  # The copies write as threads do; the tensor cores read through another proxy.
    return buffers.index(n % BUFFERS)


@gluon.jit
def release(ring: gl.tuple, n: gl.tensor) -> None:
    """This consumer does not read filling `n` any more."""
    buffers, _, empty = ring
    BUFFERS: gl.constexpr = buffers.shape[0]
    mbarrier.arrive(empty.index(n % BUFFERS), count=1)
