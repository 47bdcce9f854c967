"""Fixtures: a log with a daemon and a gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the log."""
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with the route orders."""
    with Daemon(root) as running:
        running.ask("ROUTE ADD orders")
        yield running


@pytest.fixture
def gate(daemon: Daemon) -> Iterator[Gate]:
    """A running gate on that log."""
    with Gate(daemon.root) as running:
        yield running


@pytest.fixture
def billing(gate: Gate) -> None:
    """Create the work group billing, which has no journal yet."""
    gate.make_group("billing")
