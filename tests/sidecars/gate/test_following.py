"""Clients following a route get each record once, in order, and are not woken for records of other routes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from logs import Built
from running import eventually

from wald_gate.info.monitoring import Counts
from wald_gate.records_out.reading import Raw, Reading, Wanted
from wald_gate.records_out.threads import HeadWatcher, ReadThreads
from wald_gate.state import State

ROUTES = ("a", "b", "c")
RARE_END = b"end of it"


def begun(tmp_path: Path) -> Built:
    """A log with one record on each route."""
    built = Built(tmp_path / "root")
    for route in ROUTES:
        built.lines(route, [b"first"])
    return built


@contextmanager
def reading_state(built: Built) -> Iterator[State]:
    """The state of a gate that a read needs."""
    following = HeadWatcher(built.log)
    with ReadThreads(4) as readers:
        rights = SimpleNamespace(edition=0)
        found = SimpleNamespace(log=built.log, readers=readers, counts=Counts(), rights=rights, following=following)
        try:
            yield cast("State", found)
        finally:
            following.end()


async def followed(state: State, route: str, *, until: bytes, silent_seconds: float, stop: int | None = None) -> bytes:
    """Return the values that a client receives from the oldest record up to the value ``until``."""
    got = b""
    with state.following.watching(route) as watch:
        reading = Reading(state, "ann", Wanted(route, "earliest", stop), Raw(), watch)
        try:
            first = await reading.chunk()
            async for chunk in reading.chunks(first, follow=True, edition=0, silent_seconds=silent_seconds):
                got += chunk
                if until and got.endswith(until + b"\n"):
                    break
        finally:
            reading.close()
    return got


async def write(built: Built, choice: random.Random, steps: int) -> dict[str, bytes]:
    """Append long records in pieces, many records, cuts and seals; return the values by route."""
    written = dict.fromkeys(ROUTES, b"first\n")
    open_routes: set[str] = set()
    for number in range(steps):
        route = choice.choice(ROUTES)
        step = choice.random()
        if step < 0.1 and built.last >= built.writer.base_sequence:
            built.cut()
        elif 0.1 <= step < 0.2:
            built.seal()
        elif step < 0.3 and not {"b", "c"} & open_routes:
            lines = [b"many %d.%d" % (number, each) for each in range(1500)]
            built.lines("b", lines)
            written["b"] += b"".join(line + b"\n" for line in lines)
        elif route in open_routes or step < 0.5:
            ends = choice.random() < 0.5
            value = b"piece %d" % number + (b"\n" if ends else b"")
            built.piece(route, value, begins=route not in open_routes, ends=ends)
            written[route] += value
            (open_routes.discard if ends else open_routes.add)(route)
        else:
            built.lines(route, [b"line %d" % number])
            written[route] += b"line %d\n" % number
        await asyncio.sleep(choice.choice((0, 0, 0.002)))
    for route in ROUTES:
        if route in open_routes:
            built.piece(route, b"\n", begins=False, ends=True)
            written[route] += b"\n"
        built.lines(route, [RARE_END])
        written[route] += RARE_END + b"\n"
    return written


def test_a_client_that_reads_one_view_in_many_chunks_misses_nothing(tmp_path: Path) -> None:
    """Records arrive while a snapshot is being read, and none arrive before its remaining chunks are read."""
    built = begun(tmp_path)
    lines = [b"%05d " % number + b"." * 1000 for number in range(4000)]
    for start in range(0, 2000, 100):
        built.lines("a", lines[start : start + 100])

    async def test() -> None:
        with reading_state(built) as state, state.following.watching("a") as watch:
            reading = Reading(state, "ann", Wanted("a", "earliest", None), Raw(), watch)
            got = await reading.chunk() or b""
            for start in range(2000, 4000, 100):
                built.lines("a", lines[start : start + 100])
            await asyncio.to_thread(eventually, lambda: watch._has_come and state.following.last == built.last)
            chunks = 1
            while got.count(b"\n") < 4001 and (chunk := await reading.chunk() or await more(reading)):
                got += chunk
                chunks += 1
            reading.close()
        assert chunks > 3
        assert got == b"".join(line + b"\n" for line in [b"first", *lines])

    async def more(reading: Reading) -> bytes:
        return (await reading.chunk() or b"") if await reading.more(60) else b""

    asyncio.run(test())


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_each_client_gets_each_record_of_its_route_once(tmp_path: Path, seed: int) -> None:
    built = begun(tmp_path)
    choice = random.Random(seed)

    async def test() -> None:
        with reading_state(built) as state:
            clients = {
                route: [
                    asyncio.create_task(followed(state, route, until=RARE_END, silent_seconds=s)) for s in (0.003, 60)
                ]
                for route in ROUTES
            }
            written = await write(built, choice, 60)
            for route in ROUTES:
                assert await asyncio.gather(*clients[route]) == [written[route]] * 2

    asyncio.run(test())


def test_a_client_is_not_woken_by_records_of_other_routes(tmp_path: Path) -> None:
    built = begun(tmp_path)

    async def test() -> None:
        following = HeadWatcher(built.log)
        with following.watching("a") as rare, following.watching("b") as busy:
            assert await rare.wait(None)  # it checks the log once
            while following.last != built.last or not await busy.wait(None):
                await asyncio.sleep(0.001)
            rare.clear()
            busy.clear()
            built.lines("b", [b"x"] * 3)
            assert await busy.wait(None)
            assert not await rare.wait(0)
            assert rare.clear() == built.last + 1
            built.lines("a", [b"x"])
            assert await rare.wait(None)
            assert rare.clear() == built.last
        following.end()

    asyncio.run(test())


def test_a_client_is_woken_when_the_log_was_copied_back(tmp_path: Path) -> None:
    built = begun(tmp_path)
    built.lines("a", [b"one"])
    head = built.log.root.head.read_bytes()
    built.lines("a", [b"two"])

    async def test() -> None:
        following = HeadWatcher(built.log)
        with following.watching("a") as watch:
            await watch.wait(None)
            watch.clear()
            built.log.root.head.write_bytes(head)
            assert await watch.wait(None)
        following.end()

    asyncio.run(test())


def test_a_record_whose_end_is_still_to_come_is_not_passed_over(tmp_path: Path) -> None:
    """Neither the id from which an idle client resumes nor the end of the requested range skips the record."""
    built = begun(tmp_path)
    long = built.piece("a", b"begin ", begins=True, ends=False)
    built.lines("b", [b"x"] * 3)

    async def test() -> None:
        with reading_state(built) as state, state.following.watching("a") as watch:
            client = asyncio.create_task(followed(state, "a", until=b"", silent_seconds=60, stop=long))
            reading = Reading(state, "ann", Wanted("a", "earliest"), Raw(), watch)
            assert await reading.chunk() == b"first\n"
            assert await reading.chunk() == b""
            assert reading.last == long - 1
            reading.close()
            built.piece("a", b"end\n", begins=False, ends=True)
            assert await client == b"first\nbegin end\n"

    asyncio.run(test())
