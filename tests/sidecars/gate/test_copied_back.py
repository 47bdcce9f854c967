"""A gate on a log that is copied back under it goes on with what there is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from copied_back import copy, copy_back
from gating import Gate
from repeating import ORDERS
from running import Daemon

import wald
from wald_gate.outgoing.following import Following


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


def test_who_follows_waits_at_the_end_that_the_log_has_now(gate: Gate, daemon: Daemon, root: Path) -> None:
    """And does not look for records that were there before, again and again."""
    gate.post(ORDERS, b"kept\n")

    async def test() -> None:
        following = Following(wald.open(root))
        following.move(4)
        assert not await following.beyond(1, 0.05)
        assert await following.beyond(0, None)
        waiting = asyncio.create_task(following.beyond(1, None))
        await asyncio.to_thread(gate.post, ORDERS, b"new\n")
        assert await waiting

    asyncio.run(test())
