"""Fixtures: a log with a daemon and a gate, for one test or for all tests of a module."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gating import Gate, serving
from running import Daemon

import wald


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A running gate for all tests of a module, on a log with the route orders."""
    with serving(tmp_path_factory.mktemp("shared") / "log") as gate:
        yield gate


@pytest.fixture
def stored(shared: Gate) -> Callable[[], list[bytes]]:
    """A function that returns the values stored on the route orders since its previous call."""
    log = wald.open(shared.root)
    seen = head.sequence if (head := log.head()) else 0

    def news() -> list[bytes]:
        nonlocal seen
        found = list(log.records("orders", start=seen + 1))
        seen = found[-1].sequence if found else seen
        return [record.value for record in found]

    return news
