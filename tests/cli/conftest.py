"""A root with a running daemon, and a check that failing commands leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, output_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The path of a log that may not exist yet."""
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with one route, ``a``."""
    with Daemon(root) as running:
        output_of("route", "add", "a", "--root", root)
        yield running
