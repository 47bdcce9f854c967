"""Torture: no acknowledged record is lost or stored twice. ``scripts/torture`` runs for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from endurance import CUTS, KILLS, MIXED, Storm, endure


@pytest.mark.parametrize(
    ("storm", "seconds"),
    [
        pytest.param(KILLS, 3, id="kills"),
        pytest.param(MIXED, 20, id="mixed", marks=pytest.mark.slow),
        pytest.param(CUTS, 20, id="cuts", marks=pytest.mark.slow),
    ],
)
def test_a_storm_loses_and_doubles_nothing(tmp_path: Path, storm: Storm, seconds: float) -> None:
    tally = endure(tmp_path, storm, seconds=seconds, seed=1)

    assert tally.wrong == [], str(tally)
    assert tally.acknowledged == tally.read > 0
    assert tally.faults
    assert tally.cuts > 0
    assert (tally.lost, tally.doubled) == (0, 0)
