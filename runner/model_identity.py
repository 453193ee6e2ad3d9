"""What makes a model folder the same model, without reading all of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

_READ_WHOLE = (".json", ".jinja", ".model", ".txt")  # configs, tokenizers, chat templates
_SAMPLED = ".safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


def model_identity(folder: Path) -> dict[str, str]:
    """File name -> "size, digest" of every file that decides what the model says.

    Configs, tokenizers and templates are hashed whole. Weights take too long for that: they are told
    apart by their size and by `_SAMPLES` evenly spread samples, the header and the end among them, which
    training anew changes everywhere. Other files, such as a model card, do not count.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return {
        path.name: f"{path.stat().st_size} bytes, {_digest(path)}"
        for path in files
        if path.suffix in (*_READ_WHOLE, _SAMPLED)
    }


def _digest(path: Path) -> str:
    if path.suffix in _READ_WHOLE:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    step = max(1, (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
