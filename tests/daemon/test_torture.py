"""Torture: no acknowledged record is lost or stored twice. ``scripts/torture`` runs for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from endurance import CUTS, MIXED, Storm, endure
from torture import torture


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["socket", "fifo"])
def test_kills_lose_and_double_nothing(root: Path, mode: str, kills: int) -> None:
    """Kills under load, every record once and in its producer's order, sequences without a gap."""
    outcome = torture(root, mode=mode, kills=kills, seed=1)

    assert outcome.faults == [], str(outcome)
    assert outcome.acknowledged > 0
    assert (outcome.lost, outcome.duplicated) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("storm", [MIXED, CUTS], ids=["mixed", "cuts"])
def test_a_storm_loses_and_doubles_nothing(tmp_path: Path, storm: Storm) -> None:
    tally = endure(tmp_path, storm, seconds=20, seed=1)

    assert tally.wrong == [], str(tally)
    assert tally.acknowledged == tally.read > 0
    assert tally.cuts > 0
    assert (tally.lost, tally.doubled) == (0, 0)
