"""Run a named workload through an installed vLLM's offline class, random weights, and print one JSON line.

python -m benchmarks.run_vllm nano --model benchmarks/models/qwen3-0.6b

vLLM's defaults, prefix caching on. The fields are those of `benchmarks.run_workload` that vLLM can tell.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.options import BLOCK_SIZE, read_workload, workload_parser
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS, Work, in_prefix_order, totals

WARM_UP_SCALE = 0.05


def main(arguments: list[str] | None = None) -> None:
    parser = _options()
    options = parser.parse_args(arguments)
    work = read_workload(parser, options)
    import torch  # Both are slow to import, and --help needs neither.

    try:
        from vllm import LLM
    except ModuleNotFoundError as error:
        parser.error(f"vLLM cannot be imported here: {error}")

    begin = time.perf_counter()
    llm = LLM(
        model=str(options.model.resolve()),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=options.max_len,
        gpu_memory_utilization=options.gpu_memory_utilization,
        num_gpu_blocks_override=options.kv_blocks,
        disable_log_stats=False,
    )
    start_seconds = time.perf_counter() - begin
    _complete(llm, WORKLOADS["nano"](WARM_UP_SCALE), options.temperature)
    llm.reset_prefix_cache()
    before = _counters(llm)
    seconds = _complete(llm, in_prefix_order(work) if options.sorted else work, options.temperature)
    hits, queries, preemptions = (after - first for after, first in zip(_counters(llm), before, strict=True))
    counts = totals(work, BLOCK_SIZE)
    line = {
        "engine": "vllm",
        "workload": options.workload,
        "model": options.model.name,
        "scale": options.scale,
        "temperature": options.temperature,
        "sorted": options.sorted,
        "start_seconds": round(start_seconds, 2),
        "pool_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "seconds": round(seconds, 2),
        "output_tok_s": round(counts["output_tokens"] / seconds),
        **counts,
        "hit_rate": round(hits / queries, 4) if queries else None,
        "preemptions": preemptions,
        "device": torch.cuda.get_device_name(),
        **provenance("vllm", "torch", "transformers", commit=options.commit),
    }
    print(json.dumps(line))


def _options() -> argparse.ArgumentParser:
    parser = workload_parser(__doc__)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU (%(default)s)")
    parser.add_argument("--sorted", action="store_true", help="pass the prompts in prefix order, not as they come")
    return parser


def _complete(llm: Any, work: list[Work], temperature: float) -> float:
    """Seconds to run all requests. Raises RuntimeError if vLLM made another number of tokens."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=item.new_tokens, ignore_eos=True, detokenize=False)
        for item in work
    ]
    prompts = [{"prompt_token_ids": item.prompt.tolist()} for item in work]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    expected = sum(item.new_tokens for item in work)
    if made != expected:
        raise RuntimeError(f"vLLM made {made} tokens, and the workload has {expected}")
    return seconds


def _counters(llm: Any) -> tuple[int, int, int]:
    """Prompt tokens found in the prefix cache, prompt tokens looked up, and preemptions, since the start."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("prefix_cache_hits", "prefix_cache_queries", "num_preemptions")
    hits, queries, preemptions = (int(values.get(f"vllm:{name}", 0)) for name in names)
    return hits, queries, preemptions


if __name__ == "__main__":
    main()
