"""Reads are scheduled fairly, shared, followed and interrupted without losing a record."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import cast

import pytest
from logs import Built
from running import eventually

from wald_gate.call import State
from wald_gate.info.monitoring import Counts
from wald_gate.records_out import reading
from wald_gate.records_out import threads as turns
from wald_gate.records_out.reading import Raw, Reading, Wanted
from wald_gate.records_out.threads import HeadWatcher, ReadThreads, SharedRead


def while_busy(client: str, test: Callable[[ReadThreads, asyncio.Task[bool], Event], Awaitable[None]]) -> None:
    """Run a test with a pool whose only thread is busy with a client's read, that read, and the event that ends it."""
    begun, goes_on = Event(), Event()

    def read() -> bool:
        begun.set()
        return goes_on.wait()

    async def run() -> None:
        with ReadThreads(1) as threads:
            running = asyncio.create_task(threads.run(client, read))
            await asyncio.to_thread(begun.wait)
            await test(threads, running, goes_on)

    asyncio.run(run())


TURNS = [
    ("greedy", "greedy greedy greedy greedy greedy ann ann bob", [], "greedy ann bob greedy ann greedy greedy greedy"),
    ("ann", "bob bob eve", [0], "bob eve"),
    ("ann", "bob bob bob eve", [0, 2], "bob eve"),
]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("busy", "asked", "given_up", "expected"), TURNS)
def test_clients_take_turns_and_one_that_gives_up_some_has_the_next_one(
    busy: str, asked: str, given_up: list[int], expected: str, *, is_late: bool
) -> None:
    done: list[str] = []

    async def test(threads: ReadThreads, running: asyncio.Task[bool], goes_on: Event) -> None:
        calls = [asyncio.create_task(threads.run(name, partial(done.append, name))) for name in asked.split()]
        await asyncio.sleep(0)  # all are queued
        if is_late and given_up:  # at the moment of its scheduling
            threads._release()
        for number in given_up:
            calls[number].cancel()
        if not is_late:
            running.cancel()  # its client keeps the thread
        goes_on.set()
        await asyncio.wait([running, *calls])
        assert [await threads.run("ann", lambda: number) for number in range(3)] == [0, 1, 2]  # noqa: B023

    while_busy(busy, test)
    assert done == expected.split()


def test_a_walk_gives_its_thread_up_between_steps_and_returns_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STEP_SECONDS", 0.0)
    done: list[str] = []

    def way() -> Generator[None, None, str]:
        yield
        done.append("ann")
        return "found"

    async def test(threads: ReadThreads, running: asyncio.Task[bool], goes_on: Event) -> None:
        walk = asyncio.create_task(threads.walk("ann", way()))
        await asyncio.sleep(0)
        other = asyncio.create_task(threads.run("bob", lambda: done.append("bob")))
        await asyncio.sleep(0)  # it is queued
        goes_on.set()
        assert await walk == "found"
        await other

    while_busy("eve", test)
    assert done == ["bob", "ann"]


ROUTES = ("a", "b", "c")
RARE_END = b"end of it"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A log with one record on each route."""
    built = Built(tmp_path / "root")
    for route in ROUTES:
        built.lines(route, [b"first"])
    return built


@contextmanager
def reading_state(built: Built, threads: int = 4) -> Iterator[State]:
    """The state of a gate that a read needs."""
    following = HeadWatcher(built.log)
    with ReadThreads(threads) as readers:
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

    def lines(route: str, values: Sequence[bytes]) -> None:
        built.lines(route, list(values))
        written[route] += b"".join(value + b"\n" for value in values)

    def piece(route: str, value: bytes, *, ends: bool) -> None:
        built.piece(route, value, begins=route not in open_routes, ends=ends)
        written[route] += value
        (open_routes.discard if ends else open_routes.add)(route)

    for number in range(steps):
        route = choice.choice(ROUTES)
        step = choice.random()
        if step < 0.1 and built.last >= built.writer.base_sequence:
            built.cut()
        elif 0.1 <= step < 0.2:
            built.seal()
        elif step < 0.3 and not {"b", "c"} & open_routes:
            lines("b", [b"many %d.%d" % (number, each) for each in range(1500)])
        elif route in open_routes or step < 0.5:
            ends = choice.random() < 0.5
            piece(route, b"piece %d" % number + b"\n" * ends, ends=ends)
        else:
            lines(route, [b"line %d" % number])
        await asyncio.sleep(choice.choice((0, 0, 0.002)))
    for route in ROUTES:
        if route in open_routes:
            piece(route, b"\n", ends=True)
        lines(route, [RARE_END])
    return written


def test_a_client_that_reads_one_view_in_many_chunks_misses_nothing(built: Built) -> None:
    """Records arrive while a snapshot is being read, and none arrive before its remaining chunks are read."""
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
def test_each_client_gets_each_record_of_its_route_once(built: Built, seed: int) -> None:
    async def test() -> None:
        with reading_state(built) as state:
            clients = {
                route: [
                    asyncio.create_task(followed(state, route, until=RARE_END, silent_seconds=s)) for s in (0.003, 60)
                ]
                for route in ROUTES
            }
            written = await write(built, random.Random(seed), 60)
            for route in ROUTES:
                assert await asyncio.gather(*clients[route]) == [written[route]] * 2

    asyncio.run(test())


def test_a_client_is_woken_by_records_of_its_route_and_when_the_log_was_copied_back(built: Built) -> None:
    copied = built.log.root.head.read_bytes()

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
            built.log.root.head.write_bytes(copied)
            assert await rare.wait(None)
        following.end()

    asyncio.run(test())


def test_a_record_whose_end_is_still_to_come_is_not_passed_over(built: Built) -> None:
    """Neither the id from which an idle client resumes nor the end of the requested range skips the record."""
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


def test_a_read_serves_all_that_waited_and_none_that_came_after_it_began() -> None:
    began, goes_on = Event(), Event()
    reads: list[int] = []

    def read() -> int:
        reads.append(len(reads) + 1)
        found = reads[-1]
        began.set()
        assert goes_on.wait(10)
        if found > 3:
            raise OSError("gone")
        return found

    async def test() -> None:
        with ThreadPoolExecutor(1) as threads:
            shared = SharedRead(read, threads)
            early = asyncio.create_task(shared.result())
            await asyncio.to_thread(began.wait, 10)
            late = [asyncio.create_task(shared.result()) for _ in range(8)]
            await asyncio.sleep(0)
            late.pop().cancel()
            goes_on.set()
            assert await early == 1
            assert await asyncio.gather(*late) == [2] * 7
            assert await shared.result() == 3
            # An error is raised for each request.
            for each in await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True):
                assert isinstance(each, OSError)
            with pytest.raises(OSError, match="gone"):
                await shared.result()

    asyncio.run(test())


def test_a_read_is_interrupted_after_its_time_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STEP_SECONDS", 0.0)
    log = Built(tmp_path / "root")
    for number in range(3):
        log.lines("common", [b"%05d " % each + b"." * 1000 for each in range(1000)])
        log.cut()
        log.lines("rare", [b"%d" % number])
        log.cut()

    async def taken(route: str, following: Callable[[Reading], Awaitable[bytes | None]]) -> bytes:
        with reading_state(log, threads=1) as state:
            one = Reading(state, "ann", Wanted(route, "earliest"), Raw())
            found = []
            while (chunk := await following(one)) != b"":
                found.append(chunk)
            one.close()
        assert None in found
        return b"".join(filter(None, found))

    assert asyncio.run(taken("rare", Reading.step)) == b"0\n1\n2\n"  # a step walks for some time only
    assert asyncio.run(taken("common", lambda one: one.chunk(0))).count(b"\n") == 3000


def test_a_follower_hears_that_it_still_waits_for_its_turn_to_read(built: Built) -> None:
    """Heartbeats carry no resume position, because no record is known to be sent."""
    begun, goes_on = Event(), Event()

    def occupy() -> None:
        begun.set()
        goes_on.wait()

    async def test() -> None:
        with reading_state(built, threads=1) as state:
            occupied = asyncio.create_task(state.readers.run("eve", occupy))
            try:
                await asyncio.to_thread(begun.wait)
                one = Reading(state, "ann", Wanted("a", "earliest"), Raw())
                chunks = one.chunks(await one.chunk(0), follow=True, edition=0, silent_seconds=0.001)
                assert [await anext(chunks) for _ in range(3)] == [b""] * 3
                assert one.sent is None
            finally:
                goes_on.set()
            while not (chunk := await anext(chunks)):
                pass
            assert chunk == b"first\n"
            await chunks.aclose()
            one.close()
            await occupied

    asyncio.run(test())


@pytest.mark.parametrize(("follow", "expected"), [(True, b""), (False, b"first\n")])
def test_rights_that_change_while_the_first_records_are_looked_for_end_what_would_have_no_end(
    built: Built, follow: bool, expected: bytes
) -> None:
    async def given() -> bytes:
        with reading_state(built, threads=1) as state:
            one = Reading(state, "ann", Wanted("a", "earliest"), Raw())
            first = await one.chunk()
            state.rights.edition = 1
            chunks = [chunk async for chunk in one.chunks(first, follow=follow, edition=0, silent_seconds=60)]
            one.close()
            return b"".join(chunks)

    assert asyncio.run(given()) == expected
