"""How much of the K/V memory holds tokens, where sequences reserve contiguous runs and where they take blocks.

python -m benchmarks.block_waste --completions out/demo/completions --pool-gib 4 --max-model-len 2048
python -m benchmarks.block_waste --workload chat

Prints a JSON line for each way to give out memory, and a table to stderr. The lengths are those of a run's
completions or of a workload; its rows are gone through in order, again and again, so that rows always wait. A
sequence holds its prompt at its first step and a token more at each further one. Nothing but memory bounds how many
run, and no prefix is shared.

- Reserving: the longest length there is, the prompt with the next power of two of the output's length, or the true
  length, as contiguous memory, from the first step to the last. These are Orca (Max), Orca (Pow2) and Orca (Oracle)
  of the PagedAttention paper (arXiv:2309.06180), which has them use a buddy allocator; first fit stands beside it.
- Paging: blocks are taken as tokens come. A row starts as soon as the blocks of all running rows, whose lengths are
  known here, never exceed the pool: the figure is about waste, and nothing is ever preempted.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.bound import read_model_cost
from benchmarks.contiguous_memory import Buddy, ContiguousMemory, FirstFit
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS

Counts = npt.NDArray[np.int64]

POOL_FILLS = 20
"""How often the rows that are gone through would fill the pool: enough for a mean."""
WARM_UP = 0.25
"""Share of these rows that is admitted before anything is measured: the first ones all start together."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALLOCATORS: dict[str, Callable[[int], ContiguousMemory]] = {"buddy": Buddy, "first fit": FirstFit}
PAPER_ALLOCATOR, PAPER_BLOCK_SIZE = "buddy", 16
PAPER_SHARES = {"reserve maximum": 0.204, "reserve power of two": 0.268, "reserve true length": 0.382, "paging": 0.963}
"""Of figure 2 of the paper: OPT-13B on an A100, at most 2,048 tokens a sequence."""
MODELS = Path(__file__).parent / "models"


class Lengths(NamedTuple):
    """int64 [rows] each: tokens of the prompt, and of the output, at least one."""

    prompt: Counts
    output: Counts

    @property
    def stored(self) -> Counts:
        """Tokens whose K/V a row comes to hold: all but the last, which nothing follows."""
        return self.prompt + self.output - 1

    def cycled(self, tokens: int) -> Lengths:
        """The rows over and over, in order, until they hold at least so many tokens."""
        rows = np.arange(len(self.prompt))
        rows = np.tile(rows, -(-tokens // int(self.stored.sum())))
        count = int(np.searchsorted(np.cumsum(self.stored[rows]), tokens)) + 1
        return Lengths(self.prompt[rows[:count]], self.output[rows[:count]])


class Way(NamedTuple):
    """How memory is given out: by an allocator of contiguous runs, or in blocks of `block_size` tokens."""

    scheme: str
    allocator: str | None = None
    block_size: int | None = None

    @property
    def paper_share(self) -> float | None:
        """What the paper reports for it, if it does."""
        as_in_paper = self.allocator == PAPER_ALLOCATOR or self.block_size == PAPER_BLOCK_SIZE
        return PAPER_SHARES[self.scheme] if as_in_paper else None

    def __str__(self) -> str:
        return f"{self.scheme}, {self.allocator or f'blocks of {self.block_size}'}"


@dataclass(frozen=True, slots=True)
class Shares:
    """What the slots of the K/V memory are, as shares of all slots, and how many sequences hold them; means over time.

    `tokens` hold a token, `reserved` will hold one of the sequence that has them, `unused` are given to a sequence
    that never fills them, and `free` are given to none: what no waiting row could take, or, where memory is paged,
    what the running ones are still to grow into.
    """

    tokens: float
    reserved: float
    unused: float
    free: float
    sequences: float

    @property
    def tokens_of_given(self) -> float:
        """The share of the slots given to sequences that hold a token."""
        return self.tokens / (1 - self.free)


class _Observed(NamedTuple):
    """int64 [rows] each: the first step of a row that is measured, and the one after the last, from its start."""

    first: Counts
    end: Counts
    steps: int  # that are measured

    @classmethod
    def at_full(cls, starts: Counts, lengths: Lengths) -> _Observed:
        """From the admission of the first row after the warm-up to that of the last one."""
        begin, end = int(starts[int(WARM_UP * len(starts))]), int(starts[-1])
        if begin == end:
            raise ValueError("all rows fit at once: nothing ever waits for memory")
        return cls(np.clip(begin - starts, 0, lengths.output), np.clip(end - starts, 0, lengths.output), end - begin)

    @property
    def counts(self) -> Counts:
        return self.end - self.first

    def token_steps(self, lengths: Lengths) -> Counts:
        """Tokens of each row, summed over its measured steps."""
        return self.counts * lengths.prompt + self.counts * (self.first + self.end - 1) // 2


def reserved_shares(lengths: Lengths, reservation: Counts, pool_tokens: int, memory: ContiguousMemory) -> Shares:
    """Contiguous runs of `reservation` int64 [rows] slots, from a memory of `pool_tokens`, each held to its row's end.

    Raises ValueError for a run that an empty memory cannot hold, and where no row ever waits.
    """
    observed = _Observed.at_full(reserved_starts(lengths, reservation, memory), lengths)
    taken = np.array([memory.taken(slots) for slots in reservation.tolist()], np.int64)
    given, filled = observed.counts * taken, observed.counts * lengths.stored
    return _shares(observed, pool_tokens, observed.token_steps(lengths), filled, given)


def paged_shares(lengths: Lengths, pool_tokens: int, block_size: int) -> Shares:
    """Blocks of `block_size` slots, taken as tokens come.

    Raises ValueError for a row that an empty pool cannot hold, and where no row ever waits.
    """
    observed = _Observed.at_full(paged_starts(lengths, block_size, pool_tokens // block_size), lengths)
    stored = lengths.stored
    given = _block_steps(lengths.prompt + observed.end - 1, block_size)
    given = block_size * (given - _block_steps(lengths.prompt + observed.first - 1, block_size))
    last_block_from = (stored - 1) // block_size * block_size + 1 - lengths.prompt  # the step that takes it
    in_last_block = np.maximum(observed.end - np.maximum(observed.first, last_block_from), 0)
    filled = given - in_last_block * (-stored % block_size)
    return _shares(observed, pool_tokens, observed.token_steps(lengths), filled, given)


def _shares(observed: _Observed, pool_tokens: int, tokens: Counts, filled: Counts, given: Counts) -> Shares:
    """From slots times steps of each row that hold tokens, that hold or will hold them, and that are given to it."""
    slots = pool_tokens * observed.steps
    return Shares(
        tokens=int(tokens.sum()) / slots,
        reserved=int((filled - tokens).sum()) / slots,
        unused=int((given - filled).sum()) / slots,
        free=1 - int(given.sum()) / slots,
        sequences=int(observed.counts.sum()) / observed.steps,
    )


def _block_steps(tokens: Counts, block_size: int) -> Counts:
    """Blocks of a sequence that grows from 1 token to `tokens`, summed over its steps."""
    full, rest = np.divmod(tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def reserved_starts(lengths: Lengths, reservation: Counts, memory: ContiguousMemory) -> Counts:
    """The step at which each row starts, int64 [rows]: in order, each as soon as its run fits."""
    now = 0
    starts: list[int] = []
    running: list[tuple[int, int]] = []  # a heap of (step after the last one, first slot)
    for slots, output in zip(reservation.tolist(), lengths.output.tolist(), strict=True):
        while (place := memory.take(slots)) is None:
            if not running:
                raise ValueError(f"a row reserves {slots} slots, and the memory has no run of so many")
            now = running[0][0]
            while running and running[0][0] == now:
                memory.give_back(heapq.heappop(running)[1])
        starts.append(now)
        heapq.heappush(running, (now + output, place))
    return np.array(starts, np.int64)


def paged_starts(lengths: Lengths, block_size: int, pool_blocks: int) -> Counts:
    """The step at which each row starts, int64 [rows]: in order, each as soon as no coming step needs too many."""
    largest = int(-(-lengths.stored.max() // block_size))
    if largest > pool_blocks:
        raise ValueError(f"a row takes {largest} blocks of {block_size} slots, and the pool has {pool_blocks}")
    now = 0
    starts: list[int] = []
    held = np.zeros(int(lengths.output.sum()), np.int64)  # blocks in use at each step, of rows that have started
    for prompt, output in zip(lengths.prompt.tolist(), lengths.output.tolist(), strict=True):
        blocks = -(-np.arange(prompt, prompt + output) // block_size)
        while np.any(held[now : now + output] + blocks > pool_blocks):
            now += 1
        held[now : now + output] += blocks
        starts.append(now)
    return np.array(starts, np.int64)


def main(arguments: list[str] | None = None) -> None:
    parser = _options()
    options = parser.parse_args(arguments)
    try:
        lengths = _read_completions(options.completions) if options.completions else _of_workload(options.workload)
        pool_tokens = int(options.pool_gib * 2**30) // read_model_cost(options.model).kv_bytes
        _check(lengths, pool_tokens, options.max_model_len)
        results = list(compare(lengths.cycled(POOL_FILLS * pool_tokens), pool_tokens, options.max_model_len))
    except (OSError, ValueError, pa.ArrowException) as error:
        parser.error(str(error))
    common = {
        "lengths": _name(options),
        "rows": len(lengths.prompt),
        "mean_prompt_tokens": round(float(lengths.prompt.mean()), 1),
        "mean_output_tokens": round(float(lengths.output.mean()), 1),
        "longest": int((lengths.prompt + lengths.output).max()),
        "max_model_len": options.max_model_len,
        "model": options.model.name,
        "pool_tokens": pool_tokens,
    }
    source = provenance("numpy", commit=options.commit)
    for way, shares in results:
        figures = {**asdict(shares), "tokens_of_given": shares.tokens_of_given}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        print(json.dumps({**common, **way._asdict(), **rounded, "paper_tokens": way.paper_share, **source}))
    print(_table(results), file=sys.stderr)


def compare(lengths: Lengths, pool_tokens: int, max_model_len: int) -> Iterator[tuple[Way, Shares]]:
    """Every way to give out memory, and what it comes to."""
    reservations = {
        "reserve maximum": np.full(len(lengths.prompt), max_model_len),
        "reserve power of two": np.minimum(lengths.prompt + _next_power_of_two(lengths.output), max_model_len),
        "reserve true length": lengths.stored,
    }
    for scheme, reservation in reservations.items():
        for allocator, memory in ALLOCATORS.items():
            shares = reserved_shares(lengths, reservation, pool_tokens, memory(pool_tokens))
            yield Way(scheme, allocator=allocator), shares
    for block_size in BLOCK_SIZES:
        yield Way("paging", block_size=block_size), paged_shares(lengths, pool_tokens, block_size)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--completions", type=Path, nargs="+", help="folders of runs, OUT/completions, for lengths")
    lengths.add_argument("--workload", choices=WORKLOADS, default="chat", help="for lengths (%(default)s)")
    parser.add_argument("--model", type=Path, default=MODELS / "llama-3.1-8b", help="for the K/V bytes of a token")
    parser.add_argument("--pool-gib", type=float, default=40, help="K/V memory (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="longest sequence there may be (%(default)s)")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    return parser


def _name(options: argparse.Namespace) -> str:
    """Of the workload, or of the folders that the runs wrote to."""
    folders: list[Path] = options.completions or []
    return "+".join(folder.resolve().parent.name for folder in folders) or options.workload


def _of_workload(name: str) -> Lengths:
    work = WORKLOADS[name](1.0)
    return Lengths(np.array([len(item.prompt) for item in work]), np.array([item.new_tokens for item in work]))


def _read_completions(folders: list[Path]) -> Lengths:
    """Of the rows of runs that ended without an error, in the order of the files."""
    columns = ["prompt_tokens", "output_tokens", "finish_reason"]
    table = pa.concat_tables([pq.read_table(folder, columns=columns) for folder in folders])
    table = table.filter(pc.not_equal(table["finish_reason"], "error"))
    if not len(table):
        raise ValueError(f"{', '.join(map(str, folders))}: no row has a completion")
    return Lengths(*(table[name].to_numpy().astype(np.int64) for name in columns[:2]))


def _check(lengths: Lengths, pool_tokens: int, max_model_len: int) -> None:
    longest = int((lengths.prompt + lengths.output).max())
    if not longest <= max_model_len <= pool_tokens:
        raise ValueError(
            f"--max-model-len {max_model_len} must hold the longest row, of {longest} tokens, "
            f"and fit --pool-gib, which holds {pool_tokens}"
        )


def _next_power_of_two(counts: Counts) -> Counts:
    return 1 << np.ceil(np.log2(counts)).astype(np.int64)


def _table(results: list[tuple[Way, Shares]]) -> str:
    columns = ("tokens", "reserved", "unused", "free", "of given", "sequences", "paper")
    lines = [f"{'':<30}" + "".join(f"{name:>10}" for name in columns)]
    for way, shares in results:
        parts = (shares.tokens, shares.reserved, shares.unused, shares.free, shares.tokens_of_given)
        paper = "" if way.paper_share is None else f"{way.paper_share:10.1%}"
        lines.append(f"{way!s:<30}" + "".join(f"{part:10.1%}" for part in parts) + f"{shares.sequences:10.1f}{paper}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
