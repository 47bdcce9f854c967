"""An empty log, and owners whose maintenance retries soon."""

from pathlib import Path

import pytest
from logs import Built


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of the maintenance thread, which only tests would wait for."""
    monkeypatch.setattr("wald.work.dead_letters._EVERY_SECONDS", 0.05)
    monkeypatch.setattr("wald.work.dead_letters._RETRY_SECONDS", 0.2)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")
