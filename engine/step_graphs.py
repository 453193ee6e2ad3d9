"""Forward passes captured as CUDA graphs, for steps of few tokens, whose kernels take less time than their launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from engine.batch import Batch
from engine.step_inputs import StepInputs, padded_arrays
from engine.upload import Upload, lay_out

DECODE_SIZES = (
    *(1, 2, 4),
    *range(8, 33, 8),
    *range(48, 129, 16),
    *range(160, 257, 32),
    *range(320, 513, 64),
    *range(640, 1025, 128),
)
MIXED_SIZES = (16, 64, 128, 256, 384, 512, 768, 1024)
"""Tokens of the captured steps, of decodes alone and with prompt chunks among them."""

Forward = Callable[[StepInputs, int], None]
"""Computes a step, given its inputs and the most query tokens that any of its sequences may have."""


class StepGraphs:
    """One graph for each captured number of tokens; a step runs in the next larger one, padded.

    All graphs read their inputs from one buffer and share the memory of their activations, since they run
    one after the other.
    """

    def __init__(self, max_seqs: int, max_batch_tokens: int, device: torch.device) -> None:
        self.decode_sizes = _up_to(DECODE_SIZES, max_seqs)
        self.mixed_sizes = _up_to(MIXED_SIZES, min(max_batch_tokens, MIXED_SIZES[-1]))
        self._upload = Upload(device)
        _, length = lay_out(padded_arrays(None, self.largest))
        self._inputs = torch.zeros(length, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def largest(self) -> int:
        """Tokens of the largest captured step."""
        return max(self.decode_sizes[-1], self.mixed_sizes[-1])

    @property
    def keys(self) -> list[tuple[int, bool]]:
        """(tokens, whether there are prompt chunks) of all graphs, largest first: the others fit into its memory."""
        decodes = [(size, False) for size in self.decode_sizes]
        mixed = [(size, True) for size in self.mixed_sizes]
        return sorted(decodes + mixed, reverse=True)

    def capture(self, key: tuple[int, bool], forward: Forward) -> None:
        """Capture one graph of `forward`, which must leave its result in memory of its own.

        The step is computed once before, without a single token, so that its kernels are loaded.
        """
        size, mixed = key
        arrays = padded_arrays(None, size)
        self._upload.send_into(self._inputs, arrays)
        fields, _ = lay_out(arrays)
        inputs = StepInputs(*(field.of(self._inputs) for field in fields))
        max_query_len = size if mixed else 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            forward(inputs, max_query_len)
            torch.cuda.synchronize()
            # Other threads may allocate page-locked memory meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                forward(inputs, max_query_len)
            finally:
                graph.capture_end()
        self._graphs[key] = graph

    def run(self, batch: Batch) -> bool:
        """Compute a step from its graph; False if no graph is large enough."""
        tokens, mixed = len(batch.token_ids), batch.num_decodes < len(batch.slots)
        sizes = self.mixed_sizes if mixed else self.decode_sizes
        place = bisect_left(sizes, tokens)
        graph = self._graphs.get((sizes[place], mixed)) if place < len(sizes) else None
        if graph is None:
            return False
        self._upload.send_into(self._inputs, padded_arrays(batch, sizes[place]))
        graph.replay()
        return True


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)
