"""Answers over HTTP hold after any process is killed. ``scripts/torture --mode gate`` runs for longer."""

from pathlib import Path

import pytest
from full_disk import small_file_system
from gate_torture import torture_gate


@pytest.mark.slow
def test_some_kills_break_no_promise(root: Path) -> None:
    outcome = torture_gate(root, kills=3, seed=3)

    assert outcome.wrong == [], str(outcome)
    assert outcome.counts["sent"] > 0
    assert outcome.counts["acknowledged"] > 0


@pytest.mark.slow
def test_kills_and_a_full_disk_break_no_promise(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 512 << 20) as at:
        outcome = torture_gate(at / "log", kills=10, seed=1, small_disk=True)

    assert outcome.wrong == [], str(outcome)
    assert outcome.counts["replayed"] > 0
    assert outcome.counts["acknowledged"] > 0
