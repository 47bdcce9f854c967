"""An empty log, and no pause before a damaged head is read again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import Built


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")


@pytest.fixture(autouse=True)
def _no_pause() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # the test's own is undone before its directory is removed
        patch.setattr("wald.segments.durable_end._PAUSE_SECONDS", 0)
        yield
