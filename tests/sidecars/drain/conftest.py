"""A root with a daemon, and drains that are killed at the end of their test."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from draining import drain_command
from jobs import VALUES, Jobs
from logs import Built
from running import Daemon, launched


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Root of a log, which need not exist yet."""
    return tmp_path / "log"


@pytest.fixture
def built(root: Path) -> Built:
    """Records 1 to 20 on route a, each with its sequence as value; no daemon runs."""
    log = Built(root)
    log.lines("a", [value.encode() for value in VALUES])
    return log


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon."""
    with Daemon(root) as running:
        yield running


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """A command for workers."""
    made = Jobs(tmp_path)
    yield made
    made.end()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a wald-drain whose stderr is a pipe."""
    with ExitStack() as running:

        def start_drain(*arguments: object) -> subprocess.Popen[bytes]:
            process = running.enter_context(launched(drain_command(*arguments), stderr=subprocess.PIPE))
            running.callback(process.kill)
            return process

        yield start_drain
