"""What one says to run a workload, the same for every engine that is measured, and what of it cannot run."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.workloads import WORKLOADS, Work

BLOCK_SIZE = 16
"""Tokens of a K/V block."""


def workload_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the workload, the model and how to run it; an engine adds its own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--kv-blocks", type=int, help=f"K/V blocks of {BLOCK_SIZE} tokens; as many as fit if unset")
    parser.add_argument("--max-len", type=int, default=8192, help="longest sequence, in tokens (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="of sampling; 0 is greedy (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the workload's requests (%(default)s)")
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    return parser


def read_workload(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Work]:
    """The requests of the workload; a model folder or length that cannot run them ends the process with a line."""
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: a folder with a config.json is needed")
    work = WORKLOADS[options.workload](options.scale)
    longest = max(len(item.prompt) + item.new_tokens for item in work)
    if longest > options.max_len:
        parser.error(f"--max-len {options.max_len}: {options.workload} has sequences of {longest} tokens")
    return work
