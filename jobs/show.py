"""Shows the output of a job: some completions, prefix reuse and pool occupancy.

`python -m jobs.show OUT [--rows 5]`
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0, or 2 where the folder holds no finished job."""
    parser = argparse.ArgumentParser(prog="python -m jobs.show", description="Show the output of a job.")
    parser.add_argument("out", type=Path, help="the output folder, the job's sink.path")
    parser.add_argument("--rows", type=int, default=5, help="completions to show (default 5)")
    options = parser.parse_args(argv)
    out = options.out.expanduser()
    summaries = sorted((out / "summary").glob("shard-*.json"))
    if not summaries:
        print(f"jobs.show: {out} holds no finished job (no summary/shard-*.json)", file=sys.stderr)
        return 2
    completions = pq.read_table(out / "completions")
    print(completions_text(completions, options.rows))
    print(prefix_text([json.loads(path.read_text(encoding="utf-8")) for path in summaries]))
    print(pool_text(pq.read_table(out / "stats")))
    return 0


def completions_text(completions: pa.Table, rows: int) -> str:
    """`rows` completions spread evenly over the table, each under its kept columns."""
    count = max(0, min(rows, completions.num_rows))
    picked = [index * completions.num_rows // count for index in range(count)]
    kept = completions.column_names[completions.column_names.index("output_tokens") + 1 :]
    has_samples = pc.any(pc.greater(completions["sample"], 0)).as_py()
    lines: list[str] = []
    for row in completions.take(pa.array(picked, pa.int64())).to_pylist():
        sample = f", sample {row['sample']}" if has_samples else ""
        lines.append(f"row {row['row_id']}" + (f", id {row['id']}" if "id" in row else "") + sample)
        lines += [_wrapped(name, str(row[name])) for name in kept]
        answer = row["completion"] if row["error"] is None else f"error: {row['error']}"
        lines += [_wrapped("completion", answer.strip()), ""]
    return "\n".join(lines)


def prefix_text(summaries: Sequence[dict[str, Any]]) -> str:
    """Prompt tokens that the last attempt found in the prefix cache beside the highest share possible, by shard."""
    return "\n".join(
        f"prefix hits   {each['hit_rate']:.2%} of {each['attempt_prompt_tokens']:,} prompt tokens"
        f"{' (last attempt)' if each['attempt_rows'] < each['rows'] else ''}; "
        f"highest possible within windows {each['highest_hit_rate']:.2%}"
        for each in summaries
    )


def pool_text(stats: pa.Table) -> str:
    """Shares of the K/V blocks held by running rows, over the steps of all attempts."""
    if stats.num_rows == 0:
        return "pool          no steps"
    live = pc.divide(pc.cast(stats["blocks_live"], pa.float64()), pc.cast(stats["blocks_total"], pa.float64()))
    return (
        f"pool          {pc.max(stats['blocks_total']).as_py():,} blocks; held by running rows "
        f"{pc.mean(live).as_py():.1%} on average, {pc.max(live).as_py():.1%} at most; "
        f"{stats.num_rows:,} steps, {pc.max(stats['running']).as_py():,} rows at once, "
        f"{pc.sum(stats['preemptions']).as_py():,} preemptions"
    )


def _wrapped(name: str, text: str) -> str:
    """A named text, wrapped and indented below its name; its own line breaks are kept."""
    head = f"  {name:<12}"
    lines = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, _WIDTH - len(head)) or [""]]
    return head + ("\n" + " " * len(head)).join(lines)


if __name__ == "__main__":
    sys.exit(main())
