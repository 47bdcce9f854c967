"""A root with a daemon on it, and what must not change when a command fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, output_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a log is, or will be."""
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with one route, ``a``."""
    with Daemon(root) as running:
        output_of("route", "add", "a", "--root", root)
        yield running
