"""SIGKILL at random moments: nothing acknowledged is lost, nothing is doubled. ``make torture`` goes on for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from torture import torture


@pytest.mark.parametrize("mode", ["socket", "fifo"])
def test_kills_lose_and_double_nothing(root: Path, mode: str) -> None:
    """Six kills under load, every record once and in its producer's order, sequences without a gap."""
    outcome = torture(root, mode=mode, kills=6, seed=1)

    assert outcome.faults == [], str(outcome)
    assert outcome.acknowledged > 0
    assert (outcome.lost, outcome.duplicated) == (0, 0)
