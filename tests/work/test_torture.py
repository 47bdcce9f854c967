"""Torture of a work group: its promises hold under kills. ``scripts/torture --mode work`` runs for longer."""

from pathlib import Path

import pytest
from workgroup_torture import ORDERS, torture_workers

from wald.work.group import Order


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_kills_break_no_promise(tmp_path: Path, order: Order) -> None:
    outcome = torture_workers(tmp_path / "place", order=order, kills=12, seed=1)

    assert outcome.wrong == [], str(outcome)
    assert outcome.counts["kills"] >= 12
    for name in ("acknowledged", "again", "dead letters", "segments reclaimed"):
        assert outcome.counts[name] > 0, name
