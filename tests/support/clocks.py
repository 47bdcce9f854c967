"""Programs whose wall clock differs from the machine's."""

from __future__ import annotations

from pathlib import Path

_MOVED = """
import time

real = time.time_ns
time.time_ns = lambda: real() + {ns}
time.time = lambda: time.time_ns() / 1e9
"""


def moved(directory: Path, hours: float) -> dict[str, str]:
    """Return an environment in which the clock of a Python program differs by ``hours``."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_MOVED.format(ns=int(hours * 3600 * 10**9)))
    return {"PYTHONPATH": str(directory)}
