"""Triton kernels on a CPU, run by Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest


def interpreted(module: str) -> Any:
    """A module of kernels; skips the test, or the file that is being imported, where the interpreter does not run."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here: tests/gpu covers it", allow_module_level=True)
    return pytest.importorskip(module)
