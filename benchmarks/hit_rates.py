"""How much of what could be found in the prefix cache is found: by order, eviction, block size and pool.

python -m benchmarks.hit_rates --workloads rag --orders question-major --pool-shares 0.25 0.5 1

Runs the engine over an executor without a model and prints a JSON line for each combination, and a table to stderr.
A pool holds a share of the blocks that several prompts have in common, and beside them whatever `--max-seqs` sequences
of the longest length take. Eviction is "planned" where the engine is told when each block is needed next, and "lru"
where it is not: the least recently released one goes then.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np

from benchmarks.null_executor import NullExecutor
from benchmarks.options import BLOCK_SIZE
from benchmarks.provenance import provenance
from benchmarks.workloads import ORDERS, WORKLOADS, Work, in_prefix_order, planned
from engine.admission import AdmissionRule
from engine.engine import Engine
from engine.request import Request, Sampling
from engine.scheduler import Limits
from engine.stats import StepStats
from runner.plan import highest_hit_tokens

EVICTIONS = ("planned", "lru")
TABLE_HEAD = (
    f"{'workload':<10}{'order':<16}{'eviction':<10}{'block':>6}{'pool':>8}{'hits':>8}{'highest':>8}{'of it':>8}"
    f"{'recomputed':>12}{'evictions':>11}"
)


@dataclass(frozen=True, slots=True)
class HitRates:
    """What a run found in the prefix cache, as shares of its prompt tokens, and what it threw away.

    `hit_rate` counts first admissions and `inflight_hit_rate` the part of it that the same step fills;
    `highest_hit_rate` is the most that any schedule can find. `recompute_share` is the share of prefilled tokens
    that had been computed before.
    """

    hit_rate: float
    inflight_hit_rate: float
    highest_hit_rate: float
    recompute_share: float
    evictions: int
    preemptions: int
    steps: int

    @property
    def of_highest(self) -> float:
        """The part of what could be found that was found; 1 where nothing could."""
        return self.hit_rate / self.highest_hit_rate if self.highest_hit_rate else 1.0


def measure(
    work: list[Work],
    limits: Limits,
    *,
    order: str,
    eviction: str,
    num_blocks: int,
    block_size: int,
    admission: AdmissionRule = "planned",
) -> HitRates:
    """Run `work` in one of `ORDERS` and with one of `EVICTIONS`, over `num_blocks` blocks of `block_size` tokens.

    Raises RuntimeError for a request that cannot run.
    """
    engine = Engine(
        NullExecutor(), limits, num_blocks=num_blocks, block_size=block_size, admission=admission, async_steps=True
    )
    for row, (item, reuse) in enumerate(planned(work, order, block_size)):
        known = reuse if eviction == "planned" else ()
        engine.add(Request(row, item.prompt, Sampling(max_tokens=item.new_tokens), reuse=known))
    steps: list[StepStats] = []
    while engine.has_work:
        result = engine.step()
        if errors := [completion.error for completion in result.completions if completion.error is not None]:
            raise RuntimeError(errors[0])
        if result.stats is not None:
            steps.append(result.stats)
    prompt_tokens = sum(len(item.prompt) for item in work)
    highest = highest_hit_tokens([item.prompt for item in in_prefix_order(work)], block_size)
    prefilled = sum(step.prefill_tokens for step in steps)
    return HitRates(
        hit_rate=sum(step.cached_tokens for step in steps) / prompt_tokens,
        inflight_hit_rate=sum(step.inflight_hit_tokens for step in steps) / prompt_tokens,
        highest_hit_rate=highest / prompt_tokens,
        recompute_share=sum(step.recomputed_tokens for step in steps) / prefilled,
        evictions=sum(step.evictions for step in steps),
        preemptions=sum(step.preemptions for step in steps),
        steps=len(steps),
    )


def shared_blocks(work: list[Work], block_size: int) -> int:
    """How many different blocks of tokens at least two prompts have in common."""
    prompts = [item.prompt for item in in_prefix_order(work)]
    depths = [0, *(highest_hit_tokens(pair, block_size) // block_size for pair in pairwise(prompts))]
    return int(np.maximum(np.diff(depths), 0).sum())


def running_blocks(work: list[Work], max_seqs: int, block_size: int) -> int:
    """The most blocks that `max_seqs` sequences take if they share none."""
    longest = max(len(item.prompt) + item.new_tokens for item in work)
    return max_seqs * -(-longest // block_size)


def main(arguments: list[str] | None = None) -> None:
    options = _options().parse_args(arguments)
    source = provenance("numpy", commit=options.commit)
    print(TABLE_HEAD, file=sys.stderr)
    for name, order, eviction, block_size, pool_share in product(
        options.workloads, options.orders, options.evictions, options.block_sizes, options.pool_shares
    ):
        work = WORKLOADS[name](options.scale)
        running = running_blocks(work, options.max_seqs, block_size)
        num_blocks = int(pool_share * shared_blocks(work, block_size)) + running
        limits = Limits(options.max_seqs, options.max_batch_tokens, num_blocks * block_size)
        rates = measure(
            work,
            limits,
            order=order,
            eviction=eviction,
            num_blocks=num_blocks,
            block_size=block_size,
            admission=options.admission,
        )
        line = {
            "workload": name,
            "scale": options.scale,
            "order": order,
            "eviction": eviction,
            "block_size": block_size,
            "pool_share": pool_share,
            "pool_blocks": num_blocks,
            "admission": options.admission,
            "max_seqs": options.max_seqs,
            "max_batch_tokens": options.max_batch_tokens,
            "of_highest": round(rates.of_highest, 4),
            **{field: round(value, 4) for field, value in asdict(rates).items()},
            **source,
        }
        print(json.dumps(line), flush=True)
        print(_table_row(line), file=sys.stderr)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["rag", "groups", "onesys"])
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--evictions", nargs="+", choices=EVICTIONS, default=EVICTIONS)
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[BLOCK_SIZE], help="in tokens")
    parser.add_argument("--pool-shares", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="of shared blocks")
    parser.add_argument("--admission", choices=get_args(AdmissionRule), default="planned", help="(%(default)s)")
    parser.add_argument("--max-seqs", type=int, default=16, help="sequences at a time (%(default)s)")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="tokens a step (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the workloads' requests (%(default)s)")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    return parser


def _table_row(line: dict[str, Any]) -> str:
    run = f"{line['workload']:<10}{line['order']:<16}{line['eviction']:<10}"
    memory = f"{line['block_size']:>6}{line['pool_share']:>8.2f}"
    rates = f"{line['hit_rate']:>8.4f}{line['highest_hit_rate']:>8.4f}{line['of_highest']:>8.4f}"
    return f"{run}{memory}{rates}{line['recompute_share']:>12.4f}{line['evictions']:>11,}"


if __name__ == "__main__":
    main()
