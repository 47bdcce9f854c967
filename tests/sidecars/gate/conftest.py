"""A log with a daemon and a gate on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the log is."""
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with a route."""
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
    """A work group on its route, without a journal yet."""
    gate.make_group("billing")
