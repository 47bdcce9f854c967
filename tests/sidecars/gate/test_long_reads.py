"""A long read yields its thread while it walks the log, misses nothing, and ends when its rights are revoked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from logs import Built

from wald_gate.info.monitoring import Counts
from wald_gate.records_out import reading
from wald_gate.records_out.reading import Raw, Reading, Wanted
from wald_gate.records_out.threads import ReadThreads
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


@contextmanager
def state_of(log: Built) -> Iterator[State]:
    """The state of a gate that a read uses, with one read thread."""
    with ReadThreads(1) as readers:
        rights, following = SimpleNamespace(edition=0), SimpleNamespace(is_over=False)
        found = SimpleNamespace(log=log.log, readers=readers, counts=Counts(), rights=rights, following=following)
        yield cast("State", found)


def test_a_search_continues_after_its_time_limit_and_loses_nothing(tmp_path: Path) -> None:
    lines = [b"%05d " % number + b"." * 1000 for number in range(1000)]
    log = Built(tmp_path / "root")
    log.lines("rare", lines)

    async def given() -> list[bytes | None]:
        with state_of(log) as state:
            one = Reading(state, "ann", Wanted("rare", "earliest"), Raw())
            found = []
            while (chunk := await one.chunk(0)) != b"":
                found.append(chunk)
            one.close()
            return found

    found = asyncio.run(given())

    assert None in found
    assert b"".join(filter(None, found)) == b"".join(line + b"\n" for line in lines)


def test_a_follower_hears_that_it_still_waits_for_its_turn_to_read(tmp_path: Path) -> None:
    """Heartbeats carry no resume position, because no record is known to be sent."""
    log = Built(tmp_path / "root")
    log.lines("rare", [b"1"])
    begun, goes_on = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        goes_on.wait()

    async def given() -> tuple[list[bytes], int | None, bytes]:
        with state_of(log) as state:
            occupied = asyncio.create_task(state.readers.run("eve", occupy))
            try:
                await asyncio.to_thread(begun.wait)
                one = Reading(state, "ann", Wanted("rare", "earliest"), Raw())
                chunks = one.chunks(await one.chunk(0), follow=True, edition=0, silent_seconds=0.001)
                beats, sent = [await anext(chunks) for _ in range(3)], one.sent
            finally:
                goes_on.set()
            while not (chunk := await anext(chunks)):
                pass
            await chunks.aclose()
            one.close()
            await occupied
            return beats, sent, chunk

    assert asyncio.run(given()) == ([b""] * 3, None, b"1\n")


@pytest.mark.parametrize(("follow", "expected"), [(True, b""), (False, b"1\n")])
def test_rights_that_change_while_the_first_records_are_looked_for_end_what_would_have_no_end(
    tmp_path: Path, follow: bool, expected: bytes
) -> None:
    log = Built(tmp_path / "root")
    log.lines("rare", [b"1"])

    async def given() -> bytes:
        with state_of(log) as state:
            one = Reading(state, "ann", Wanted("rare", "earliest"), Raw())
            first = await one.chunk()
            state.rights.edition = 1
            chunks = [chunk async for chunk in one.chunks(first, follow=follow, edition=0, silent_seconds=60)]
            one.close()
            return b"".join(chunks)

    assert asyncio.run(given()) == expected
