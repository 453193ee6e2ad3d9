"""Start an engine with random weights, make one token, and print when each phase was over.

`benchmarks.start_up` runs this in a fresh process. The line maps phases to seconds since the epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from engine import startup
from engine.models.config import read_model_config
from engine.request import Request, Sampling

PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--max-len", type=int, default=8192)
    options = parser.parse_args()
    ends = {"imports": time.time()}
    config = read_model_config(options.model)
    ends["config"] = time.time()
    settings = startup.EngineSettings(dummy_weights=True, max_model_len=options.max_len)
    with _noting_end(ends, "load_decoder", "model"), _noting_end(ends, "plan_memory", "plan"):
        resolved = startup.resolve(settings, config)
        started = startup.start(options.model, config, settings, resolved, Sampling(), end_token_ids=())
    ends["graphs"] = time.time()
    prompt = np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32)
    started.engine.add(Request(0, prompt, Sampling(max_tokens=1, ignore_eos=True)))
    while not started.engine.step().completions:
        pass
    ends["first_token"] = time.time()
    print(json.dumps({"device": started.device_name, "ends": ends}))


@contextmanager
def _noting_end(ends: dict[str, float], function: str, phase: str) -> Iterator[None]:
    """While this is entered, a call of a function of `engine.startup` notes when it returned."""
    original = getattr(startup, function)

    def noted(*arguments: object, **keywords: object) -> object:
        result = original(*arguments, **keywords)
        ends[phase] = time.time()
        return result

    with patch.object(startup, function, noted):
        yield


if __name__ == "__main__":
    main()
