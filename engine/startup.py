"""From a model folder to an engine that is ready to step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.admission import AdmissionRule
from engine.engine import Engine
from engine.kv_cache import KVCache, KVCacheShape
from engine.memory_plan import MemoryPlan, plan_memory, plan_steps
from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.models.loader import load_decoder
from engine.request import Sampling
from engine.scheduler import Limits
from engine.stop_strings import Decode
from kernels.attention import BLOCK_SIZES, check_supported
from kernels.norm import MAX_SIZE

GPU_MAX_SEQS, GPU_MAX_BATCH_TOKENS = 1024, 8192
"""Beyond 1,024 sequences a decode step gains little per sequence; 8,192 tokens keep a GPU's matrix
products at full speed and a step well under a second."""
GPU_MOST_SEQS = 4096
"""More than these the kernel that plans a step's attention does not take at once."""
SMALLER_POOL = 0.9
"""Share of the blocks that are left after the GPU ran out of memory: frees more than a step takes."""
CPU_MAX_SEQS, CPU_MAX_BATCH_TOKENS = 64, 1024


class EngineSettingError(ValueError):
    """A setting that this model or device cannot meet: `key`, `value` and what is `accepted`."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(f"{key}: {value!r}; accepted: {accepted}")
        self.key, self.value, self.accepted = key, value, accepted


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to run a model. "auto" and None leave the choice to `resolve`; `kv_memory` is bytes.

    `cuda_graphs`, `async_steps` and `group_prefixes` (attention reads a shared prefix once for all decodes) are on by
    default on a GPU. On a CPU there are no graphs, a step that does not wait would only add work, and keys are read
    for each sequence anyway.
    """

    device: str = "auto"
    dtype: str = "auto"
    dummy_weights: bool = False
    block_size: int = 16
    kv_memory: int | None = None
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    max_model_len: int | None = None
    prefix_cache: bool = True
    admission: AdmissionRule = "planned"
    group_prefixes: bool | None = None
    cuda_graphs: bool | None = None
    async_steps: bool | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that a model and this machine lead to, before any weight is read."""

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    cuda_graphs: bool
    async_steps: bool
    group_prefixes: bool


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its memory plan, and the device by name."""

    engine: Engine
    memory_plan: MemoryPlan
    device: torch.device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def peak_bytes(self) -> int:
        """Most bytes that were allocated at once since the pool was; 0 on a CPU, where nobody counts."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def resolve(settings: EngineSettings, config: ModelConfig) -> Resolved:
    """Choose what was left open. Raises EngineSettingError for what cannot be met."""
    device = _device(settings.device)
    on_gpu = device.type == "cuda"
    try:
        check_supported(
            config.num_heads, config.num_kv_heads, config.head_dim, settings.block_size, device_type=device.type
        )
    except ValueError as error:
        if settings.block_size not in BLOCK_SIZES:
            raise EngineSettingError("engine.block_size", settings.block_size, str(error)) from error
        raise EngineSettingError("model.path", f"a {config.family} model", str(error)) from error
    if on_gpu and config.hidden_size > MAX_SIZE:
        raise EngineSettingError(
            "model.path", f"a {config.family} model", f"hidden_size of at most {MAX_SIZE} on a GPU"
        )
    if config.max_position < 2:
        raise EngineSettingError("model.path", f"a {config.family} model", "max_position_embeddings of 2 or more")
    max_seqs, max_batch_tokens = _step_size(settings, on_gpu=on_gpu)
    if on_gpu and max_seqs > GPU_MOST_SEQS:
        raise EngineSettingError("engine.max_seqs", max_seqs, f"at most {GPU_MOST_SEQS} on a GPU")
    max_model_len = settings.max_model_len or config.max_position
    if max_model_len > config.max_position:
        raise EngineSettingError(
            "engine.max_model_len", max_model_len, f"at most {config.max_position}, the model's own limit"
        )
    if settings.cuda_graphs and not on_gpu:
        raise EngineSettingError("engine.cuda_graphs", True, "auto or false without a CUDA device")
    return Resolved(
        device,
        _dtype(settings.dtype, device, config),
        Limits(max_seqs, max_batch_tokens, max_model_len),
        cuda_graphs=on_gpu if settings.cuda_graphs is None else settings.cuda_graphs,
        async_steps=on_gpu if settings.async_steps is None else settings.async_steps,
        group_prefixes=on_gpu if settings.group_prefixes is None else settings.group_prefixes,
    )


def start(
    folder: Path,
    config: ModelConfig,
    settings: EngineSettings,
    resolved: Resolved,
    sampling: Sampling,
    *,
    end_token_ids: tuple[int, ...],
    vocab_limit: int | None = None,
    decode: Decode | None = None,
    notify: Callable[[str], None] = warnings.warn,
) -> Started:
    """Load the weights, size and allocate the block pool, and make the engine.

    `sampling` is what the pool's size is measured with. `notify` gets a message if the GPU runs out of memory later,
    and the engine goes on with fewer blocks. Raises LoadError, OutOfMemoryError, and
    EngineSettingError if an explicit `max_model_len` is more than the pool holds.
    """
    model = load_decoder(folder, config, dtype=resolved.dtype, device=resolved.device, dummy=settings.dummy_weights)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, settings.block_size, resolved.dtype)
    limits, plan = plan_steps(
        lambda limits: plan_memory(
            model,
            shape,
            limits,
            sampling,
            kv_memory=settings.kv_memory,
            graphs=resolved.cuda_graphs,
            grouped=resolved.group_prefixes,
        ),
        resolved.limits,
        choose_tokens=settings.max_batch_tokens is None,
        choose_seqs=settings.max_seqs is None,
    )
    pool_tokens = plan.num_blocks * settings.block_size
    if settings.max_model_len is not None and settings.max_model_len > pool_tokens:
        raise EngineSettingError(
            "engine.max_model_len",
            settings.max_model_len,
            f"at most {pool_tokens}, the tokens that the K/V pool of {plan.num_blocks} blocks holds; "
            "or raise engine.kv_memory",
        )

    def make_runner(num_blocks: int) -> ModelRunner:
        runner = ModelRunner(
            model,
            KVCache(shape, num_blocks, resolved.device),
            limits,
            vocab_limit=vocab_limit,
            graph_tokens=plan.graph_tokens,
            filtered=sampling.filtered,
            grouped=resolved.group_prefixes,
        )
        runner.capture()
        return runner

    runner = make_runner(plan.num_blocks)

    def smaller_pool() -> tuple[ModelRunner, int]:
        num_blocks = max(1, int(plan.num_blocks * SMALLER_POOL))
        notify(
            f"the GPU ran out of memory in a step that the memory plan had room for ({plan}): going on with "
            f"{num_blocks} of {plan.num_blocks} blocks"
        )
        runner.release()
        torch.cuda.empty_cache()
        return make_runner(num_blocks), num_blocks

    engine = Engine(
        runner,
        limits,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        prefix_cache=settings.prefix_cache,
        admission=settings.admission,
        group_prefixes=resolved.group_prefixes,
        async_steps=resolved.async_steps,
        end_token_ids=end_token_ids,
        decode=decode,
        smaller_pool=smaller_pool,
    )
    if resolved.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(resolved.device)
    return Started(engine, plan, resolved.device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        found = f"cuda:0 to cuda:{count - 1}" if count else "and no CUDA device, as there is none"
        raise EngineSettingError("engine.device", name, f"auto, cpu, {found}")
    return device


def _dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """float32 on a CPU; on a GPU the checkpoint's 16-bit type, bfloat16 if it has none."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type != "cuda":
        return torch.float32
    return torch.float16 if config.hf.dtype in (torch.float16, "float16") else torch.bfloat16


def _step_size(settings: EngineSettings, *, on_gpu: bool) -> tuple[int, int]:
    """(max_seqs, max_batch_tokens): where only one is given, the other's default yields to it."""
    seqs, tokens = settings.max_seqs, settings.max_batch_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        raise EngineSettingError(
            "engine.max_seqs",
            seqs,
            f"at most engine.max_batch_tokens={tokens}: a step computes a token of each sequence",
        )
    default_seqs = GPU_MAX_SEQS if on_gpu else CPU_MAX_SEQS
    default_tokens = GPU_MAX_BATCH_TOKENS if on_gpu else CPU_MAX_BATCH_TOKENS
    if seqs is None:
        seqs = default_seqs if tokens is None else min(default_seqs, tokens)
    return seqs, max(default_tokens, seqs) if tokens is None else tokens
