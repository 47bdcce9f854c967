"""An empty log, and a daemon with a route."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import Built
from running import Daemon, output_of


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "log") as running:
        output_of("route", "add", "a", "--root", running.root)
        yield running
