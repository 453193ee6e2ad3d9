"""Weights of a model folder, from safetensors straight into the decoder's parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.models.config import ModelConfig, ModelError
from engine.models.decoder import Attention, Decoder, DecoderLayer
from engine.models.layers import MLP, Linear, NormedLinear
from engine.models.moe import SparseMLP
from engine.models.weight_copy import WeightCopy

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Buffers that older versions of transformers saved; they follow from the config.
_NOT_PARAMETERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|\.masked_bias$")
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
_DUMMY_SEED = 0
_FAULTS_SHOWN = 12
_ROWS_COMPARED = 4096  # keeps the copy on the device small


class LoadError(ModelError):
    """Weights that do not fit the model; the message lists the tensors and files concerned."""


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """What a family calls a mixture of experts and, below its `experts.<index>`, the projections of each."""

    mlp: str
    gate: str
    up: str
    down: str


_EXPERT_NAMES = {
    "mixtral": _ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen3_moe": _ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
}


def load_decoder(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, dummy: bool = False
) -> Decoder:
    """The decoder with its weights, on `device` in `dtype`, for inference.

    Tensors go from the mapped files into parameters that already lie on the device, so the host never
    holds a second copy of the model; norms are then folded in place. With `dummy`, no file is read: weights
    are random, from a fixed seed. Raises LoadError if a file is missing or broken, if a tensor has a wrong shape, and
    unless every stored tensor is used and every parameter filled.
    """
    decoder = Decoder(config, dtype=dtype, device=device).eval()
    if dummy:  # norms are 1: there is nothing to fold
        _fill_randomly(decoder, config.hf.initializer_range)
    else:
        _fill_from_files(checkpoint_slots(decoder), _weight_files(folder), config.tie_word_embeddings)
        decoder.fold_norms()
    return decoder


def checkpoint_slots(decoder: Decoder) -> dict[str, Tensor]:
    """The place of each checkpoint tensor: its transformers name -> a view into a parameter.

    The views cover every parameter, and do not overlap, save that a tied head is the embedding. A loaded decoder
    has the weights of deferred norms multiplied into the projections after them (`NormedLinear.fold_norm`).
    """
    slots = {EMBEDDING: decoder.embed_tokens.data, HEAD: decoder.lm_head.data, "model.norm.weight": decoder.norm.weight}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{index}."
        slots |= {prefix + name: place for name, place in _layer_slots(layer, decoder.config.family)}
    return slots


def _layer_slots(layer: DecoderLayer, family: str) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.attention.qkv_proj.norm.weight
    yield from _attention_slots(layer.attention)
    if isinstance(layer.mlp, SparseMLP):
        yield from _expert_slots(layer.mlp, _EXPERT_NAMES[family])
    else:
        yield from _mlp_slots(layer.mlp)


def _mlp_slots(mlp: MLP) -> Iterator[tuple[str, Tensor]]:
    inner = mlp.down_proj.weight.shape[1]
    yield "post_attention_layernorm.weight", mlp.gate_up_proj.norm.weight
    yield from _split_slots(mlp.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj"), (inner, inner))
    yield from _split_slots(mlp.down_proj, ("mlp.down_proj",), mlp.down_proj.weight.shape[:1])


def _expert_slots(mlp: SparseMLP, names: _ExpertNames) -> Iterator[tuple[str, Tensor]]:
    yield "post_attention_layernorm.weight", mlp.norm.weight
    yield f"{names.mlp}.gate.weight", mlp.router.weight
    for index, (gate_up, down) in enumerate(zip(mlp.gate_up, mlp.down, strict=True)):
        expert = f"{names.mlp}.experts.{index}"
        gate, up = gate_up.chunk(2)
        yield f"{expert}.{names.gate}.weight", gate
        yield f"{expert}.{names.up}.weight", up
        yield f"{expert}.{names.down}.weight", down


def _attention_slots(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield from _split_slots(attention.qkv_proj, names, attention.sizes)
    yield from _split_slots(attention.o_proj, ("self_attn.o_proj",), attention.o_proj.weight.shape[:1])
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}.weight", norm.weight


def _split_slots(
    linear: Linear | NormedLinear, names: Iterable[str], sizes: Iterable[int]
) -> Iterator[tuple[str, Tensor]]:
    """The stored projections that one merged projection holds, as slices of its rows."""
    start = 0
    for name, size in zip(names, sizes, strict=True):
        yield f"{name}.weight", linear.weight[start : start + size]
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias[start : start + size]
        start += size


def _fill_randomly(decoder: Decoder, std: float) -> None:
    generator = torch.Generator(decoder.embed_tokens.device).manual_seed(_DUMMY_SEED)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=std, generator=generator)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise LoadError(f"{folder}: neither {whole.name} nor {index.name} is there; weights must be safetensors")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()), key=str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index}: not a safetensors index with a weight_map: {error!r}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise LoadError(f"{index}: its weight_map names no files")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise LoadError(f"{folder}: {index.name} names files that are not there: {', '.join(missing)}")
    return [folder / name for name in names]


def _fill_from_files(slots: dict[str, Tensor], files: list[Path], tied: bool) -> None:
    stored = _check_headers(slots, files, tied)
    spare_head = stored.pop(HEAD) if tied and {EMBEDDING, HEAD} <= stored.keys() else None
    with WeightCopy(slots[EMBEDDING].device) as weight_copy:
        for path, entries in groupby(stored.items(), key=lambda entry: entry[1]):
            with _opened(path) as weights:
                weight_copy.copy((slots[name], weights.get_tensor(name)) for name, _ in entries)
    if spare_head is not None:
        _check_tied_head(slots[EMBEDDING], spare_head)


def _check_headers(slots: dict[str, Tensor], files: list[Path], tied: bool) -> dict[str, Path]:
    """The file of each stored parameter, file by file; reads no data.

    Raises LoadError with all that is missing, unused, stored twice, or of a wrong shape or dtype.
    """
    stored: dict[str, Path] = {}
    faults = []
    for path in files:
        with _opened(path) as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if _NOT_PARAMETERS.search(name):
                    continue
                header = weights.get_slice(name)
                if name in stored:
                    faults.append(f"{name} is stored twice, in {stored[name].name} and in {path.name}")
                elif fault := _header_fault(name, header.get_shape(), header.get_dtype(), slots):
                    faults.append(fault)
                stored.setdefault(name, path)
    absent = slots.keys() - stored.keys()
    # One of the two names is enough for a tied head: which one is stored depends on the tool that saved it.
    if tied and len(absent & {EMBEDDING, HEAD}) == 1:
        absent -= {EMBEDDING, HEAD}
    faults = [f"{name} is missing" for name in sorted(absent)] + faults
    if faults:
        more = f" and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        raise LoadError(
            f"{files[0].parent}: the stored tensors do not fit config.json: {'; '.join(faults[:_FAULTS_SHOWN])}{more}"
        )
    return stored


def _header_fault(name: str, shape: list[int], dtype: str, slots: dict[str, Tensor]) -> str | None:
    if name not in slots:
        return f"{name} is no part of the model"
    expected = list(slots[name].shape)
    if shape != expected:
        return f"{name} has shape {shape}, the model needs {expected}"
    if dtype not in _STORED_DTYPES:
        return f"{name} has dtype {dtype}, accepted are {', '.join(_STORED_DTYPES)}"
    return None


def _check_tied_head(embedding: Tensor, path: Path) -> None:
    """A head stored beside the embedding that it is tied to must be the same."""
    with _opened(path) as weights:
        head = weights.get_tensor(HEAD)
    rows = zip(embedding.split(_ROWS_COMPARED), head.split(_ROWS_COMPARED), strict=True)
    if not all(torch.equal(ours, stored.to(ours)) for ours, stored in rows):
        raise LoadError(
            f"{path}: {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings true; "
            "set it to false to use the stored head"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The mapped file, closed afterwards; a broken one is a LoadError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise LoadError(
            f"{path}: not a whole safetensors file ({error}); it may be cut short or a Git LFS pointer: fetch it again"
        ) from error
