"""A gate on a log that is copied back under it goes on with what there is."""

from __future__ import annotations

from pathlib import Path

from copied_back import copy, copy_back
from gating import Gate
from repeating import ORDERS
from running import Daemon


def test_records_are_stored_under_ids_that_the_log_does_not_miss(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    gate.post(ORDERS, b"kept\n")
    copy(daemon, root, tmp_path / "copy")
    for number in range(3):
        gate.post(ORDERS, b"lost %d\n" % number)
    copy_back(daemon, root, tmp_path / "copy")

    assert [gate.post(ORDERS, b"%d\n" % number).json()["first"] for number in range(2)] == [2, 3]
    assert gate.get(f"{ORDERS}?format=raw").body == b"kept\n0\n1\n"
