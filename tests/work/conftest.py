"""An empty log."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs import Built


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")
