"""How full the block pool is kept, and what is computed twice, by admission rule and distribution of output lengths.

python -m benchmarks.simulate_admission --lengths lognormal uniform --admission planned greedy

Runs the engine itself over an executor without a model, which counts the time that each of its batches would take on
an H200 at the speeds of `benchmarks.bound`. Output lengths are hidden from the engine (`Request.stop_after`) below a
cap; the rule "oracle" is planned admission that is told them. Prints a JSON line for each run, and a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.bound import BANDWIDTH, RATE, ModelCost, read_model_cost
from benchmarks.null_executor import NullExecutor, NullStep
from benchmarks.options import BLOCK_SIZE
from benchmarks.provenance import provenance
from engine.admission import AdmissionRule
from engine.batch import Batch
from engine.engine import Engine
from engine.request import Request, Sampling
from engine.scheduler import Limits
from engine.stats import StepStats

ORACLE = "oracle"
RULES = (ORACLE, "planned", "greedy", "reserve")
LIMITS = Limits(max_seqs=1024, max_batch_tokens=8192, max_model_len=8192)
"""The first two are the defaults of a GPU."""
MODEL = Path(__file__).with_name("models") / "llama-3.1-8b"
TABLE_HEAD = (
    f"{'lengths':<11}{'admission':<10}{'live':>8}{'recomputed':>12}{'preempted':>11}{'tok/s':>9}{'of oracle':>11}"
    f"{'running':>9}{'steps':>8}{'host us':>9}"
)

Lengths = npt.NDArray[np.int64]


class Traffic(NamedTuple):
    """A job: tokens of each prompt and output, the cap on outputs, and the pool in tokens."""

    prompts: Lengths
    outputs: Lengths
    cap: int
    pool_tokens: int


def _chat(outputs: Callable[[np.random.Generator, int], npt.NDArray[Any]]) -> Callable[[float], Traffic]:
    """Prompts as in ShareGPT, and a pool of 65,536 tokens, where some 150 rows run at a time."""

    def make(scale: float) -> Traffic:
        rng = np.random.default_rng(2)
        rows = max(1, round(16_384 * scale))
        prompts = np.clip(rng.lognormal(4.7, 1.2, rows), 4, 4096).astype(np.int64)
        return Traffic(prompts, np.clip(outputs(rng, rows), 1, 2048).astype(np.int64), 2048, 65_536)

    return make


def _long(scale: float) -> Traffic:
    """1,000 tokens in and 4,000 to 6,000 out, under the cap that 8,192 tokens a sequence leave."""
    rng = np.random.default_rng(5)
    rows = max(1, round(2048 * scale))
    return Traffic(np.full(rows, 1000, np.int64), rng.integers(4000, 6001, rows), 7192, 299_584)


def _bimodal(rng: np.random.Generator, rows: int) -> npt.NDArray[Any]:
    """Four short outputs to each long one."""
    return np.where(rng.random(rows) < 0.8, rng.normal(60, 15, rows), rng.normal(900, 100, rows))


LENGTHS: dict[str, Callable[[float], Traffic]] = {
    "lognormal": _chat(lambda rng, rows: rng.lognormal(4.9, 0.9, rows)),
    "uniform": _chat(lambda rng, rows: rng.integers(1, 401, rows)),
    "bimodal": _chat(_bimodal),
    "equal": _chat(lambda rng, rows: np.full(rows, 200)),
    "long": _long,
}
"""Each takes the share of its rows to make, at least one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    `live_share` is the mean share of the pool that running sequences hold while rows wait, weighted by the time of
    the steps; `recompute_share` the share of prefilled tokens that had been computed before; `output_tok_s` what the
    batches would take on the ideal GPU; `host_us_per_step` the host's real microseconds.
    """

    live_share: float
    recompute_share: float
    preemptions: int
    output_tok_s: float
    mean_running: float
    steps: int
    host_us_per_step: float


class TimedExecutor(NullExecutor):
    """Computes nothing, and adds up the seconds that its batches would take: products, reads and prefill attention."""

    def __init__(self, cost: ModelCost) -> None:
        self._cost = cost
        self.step_seconds: list[float] = []

    def launch(self, batch: Batch) -> NullStep:
        cost, decodes = self._cost, batch.num_decodes
        weights = cost.weight_bytes(len(batch.token_ids)) / BANDWIDTH
        products = cost.product_flops(len(batch.token_ids), len(batch.sampled_tokens)) / RATE
        reads = int(batch.context_lens[:decodes].sum()) * cost.kv_bytes / BANDWIDTH
        counts = np.diff(batch.query_start)[decodes:].astype(np.int64)
        pairs = float((counts * (batch.context_lens[decodes:] - (counts - 1) / 2)).sum())
        self.step_seconds.append(max(weights, products) + reads + pairs * cost.pair_flops / RATE)
        return super().launch(batch)


def simulate(traffic: Traffic, rule: str, cost: ModelCost, limits: Limits = LIMITS) -> Outcome:
    """Run all rows of `traffic` under one of `RULES`.

    Raises RuntimeError for a row that cannot run, or that ends where it should not.
    """
    executor = TimedExecutor(cost)
    engine = Engine(
        executor,
        limits,
        num_blocks=traffic.pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        async_steps=True,
        admission=_engine_rule(rule),
    )
    rng = np.random.default_rng(0)
    for row, (prompt, output) in enumerate(zip(traffic.prompts.tolist(), traffic.outputs.tolist(), strict=True)):
        tokens = rng.integers(2, 1 << 30, prompt, np.int32)
        most = output if rule == ORACLE else traffic.cap
        hidden = None if rule == ORACLE else output
        engine.add(Request(row, tokens, Sampling(max_tokens=most), stop_after=hidden))
    steps: list[StepStats] = []
    host_us: list[int] = []
    while engine.has_work:
        result = engine.step()
        for completion in result.completions:
            if len(completion.token_ids) != traffic.outputs[completion.row_id]:
                raise RuntimeError(
                    f"row {completion.row_id} has {len(completion.token_ids)} tokens: {completion.error}"
                )
        if result.stats is not None:
            steps.append(result.stats)
            host_us.append(result.host_us)
    return _outcome(traffic, steps, np.array(executor.step_seconds), host_us)


def _engine_rule(rule: str) -> AdmissionRule:
    return "greedy" if rule == "greedy" else "reserve" if rule == "reserve" else "planned"


def _outcome(traffic: Traffic, steps: list[StepStats], seconds: npt.NDArray[np.float64], host_us: list[int]) -> Outcome:
    waited = np.array([step.waiting > 0 for step in steps])
    live = np.array([step.live_fraction for step in steps])
    prefilled = sum(step.prefill_tokens for step in steps)
    weights = seconds * waited if waited.any() else seconds
    return Outcome(
        live_share=round(float(np.average(live, weights=weights)), 4),
        recompute_share=round(sum(step.recomputed_tokens for step in steps) / prefilled, 4),
        preemptions=sum(step.preemptions for step in steps),
        output_tok_s=round(float(traffic.outputs.sum() / seconds.sum())),
        mean_running=round(float(np.average([step.running for step in steps], weights=weights)), 1),
        steps=len(steps),
        host_us_per_step=round(float(np.mean(host_us)), 1),
    )


def main(arguments: list[str] | None = None) -> None:
    options = _options().parse_args(arguments)
    source = provenance("numpy", commit=options.commit)
    cost = read_model_cost(options.model)
    print(TABLE_HEAD, file=sys.stderr)
    oracles: dict[str, Outcome] = {}
    for lengths, rule in product(options.lengths, options.admission):
        traffic = LENGTHS[lengths](options.scale)
        outcome = simulate(traffic, rule, cost)
        if rule == ORACLE:
            oracles[lengths] = outcome
        of_oracle = round(outcome.output_tok_s / oracles[lengths].output_tok_s, 4) if lengths in oracles else None
        line = {
            "lengths": lengths,
            "admission": rule,
            "rows": len(traffic.prompts),
            "cap": traffic.cap,
            "pool_tokens": traffic.pool_tokens,
            "model": options.model.name,
            **asdict(outcome),
            "throughput_of_oracle": of_oracle,
            **source,
        }
        print(json.dumps(line), flush=True)
        print(_table_row(line), file=sys.stderr)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--admission", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows (%(default)s)")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    return parser


def _table_row(line: dict[str, Any]) -> str:
    share = line["throughput_of_oracle"]
    return (
        f"{line['lengths']:<11}{line['admission']:<10}{line['live_share']:>8.4f}{line['recompute_share']:>12.4f}"
        f"{line['preemptions']:>11,}{line['output_tok_s']:>9,.0f}{'' if share is None else f'{share:.4f}':>11}"
        f"{line['mean_running']:>9.1f}{line['steps']:>8,}{line['host_us_per_step']:>9.1f}"
    )


if __name__ == "__main__":
    main()
