"""Time from the start of a process to the first token of a short prompt, and print one JSON line.

python -m benchmarks.start_up --model benchmarks/models/llama-3.1-8b

Random weights. Two processes run in turn and the second counts: the first one compiles the kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

RUNS = 2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--max-len", type=int, default=8192, help="longest sequence, in tokens (%(default)s)")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    options = parser.parse_args(arguments)
    runs = [_run(options.model, options.max_len) for _ in range(RUNS)]
    line = {
        "model": options.model.name,
        "first_run_seconds": runs[0]["seconds"],
        **runs[-1],
        **provenance("torch", "triton", "transformers", commit=options.commit),
    }
    print(json.dumps(line))


def _run(model: Path, max_len: int) -> dict[str, Any]:
    """Seconds of a fresh process to its first token, in all and by phase, and the device."""
    command = [sys.executable, "-m", "benchmarks.first_token", "--model", str(model), "--max-len", str(max_len)]
    spawned = time.time()
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(process.stdout)
    ends = {"spawned": spawned, **told["ends"]}
    phases = {f"{phase}_seconds": round(ends[phase] - ends[before], 3) for before, phase in pairwise(ends)}
    return {"seconds": round(ends["first_token"] - spawned, 3), **phases, "device": told["device"]}


if __name__ == "__main__":
    main()
