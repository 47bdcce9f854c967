"""A read that takes long gives up its thread on the way through the log, misses nothing, and outlives no right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from logs import Built

from wald_gate.monitoring.counts import Counts
from wald_gate.outgoing import reading
from wald_gate.outgoing.forms import Raw
from wald_gate.outgoing.reading import Reading, Wanted
from wald_gate.outgoing.turns import ReadThreads
from wald_gate.state import State


def test_a_thread_walks_for_some_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STEP_SECONDS", 0.0)
    log = Built(tmp_path / "root")
    for number in range(3):
        log.lines("common", [b"one"])
        log.cut()
        log.lines("rare", [b"%d" % number])
        log.cut()

    async def steps() -> list[bytes | None]:
        with ReadThreads(1) as readers:
            state = cast("State", SimpleNamespace(log=log.log, readers=readers, counts=Counts()))
            one = Reading(state, "ann", Wanted("rare", "earliest"), Raw())
            found = []
            while (step := await one.step()) != b"":
                found.append(step)
            one.close()
            return found

    found = asyncio.run(steps())

    assert found.count(None) >= 1
    assert b"".join(filter(None, found)) == b"0\n1\n2\n"


@pytest.mark.parametrize(("follow", "expected"), [(True, b""), (False, b"1\n")])
def test_rights_that_change_while_the_first_records_are_looked_for_end_what_would_have_no_end(
    tmp_path: Path, follow: bool, expected: bytes
) -> None:
    log = Built(tmp_path / "root")
    log.lines("rare", [b"1"])

    async def given() -> bytes:
        with ReadThreads(1) as readers:
            rights, following = SimpleNamespace(edition=0), SimpleNamespace(is_over=False)
            found = SimpleNamespace(log=log.log, readers=readers, counts=Counts(), rights=rights, following=following)
            one = Reading(cast("State", found), "ann", Wanted("rare", "earliest"), Raw())
            first = await one.chunk()
            rights.edition = 1
            chunks = [chunk async for chunk in one.chunks(first, follow=follow, edition=0, silent_seconds=60)]
            one.close()
            return b"".join(chunks)

    assert asyncio.run(given()) == expected
