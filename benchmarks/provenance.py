"""What a figure was measured with and when."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any


def provenance(*libraries: str, commit: str | None = None) -> dict[str, Any]:
    """Date, commit (git's word unless given) and library versions, for a line of results."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or _commit(),
        "versions": {name: version(name) for name in libraries},
    }


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
