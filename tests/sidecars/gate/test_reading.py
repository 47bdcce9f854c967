"""Reads are scheduled fairly, shared, followed and interrupted without losing a record."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
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


@asynccontextmanager
async def busy(client: str) -> AsyncIterator[tuple[ReadThreads, asyncio.Task[bool], threading.Event]]:
    """Yield a pool whose only thread is busy with a client's read, that read, and the event that ends it."""
    begun, goes_on = threading.Event(), threading.Event()

    def read() -> bool:
        begun.set()
        return goes_on.wait()

    with ReadThreads(1) as threads:
        running = asyncio.create_task(threads.run(client, read))
        await asyncio.to_thread(begun.wait)
        yield threads, running, goes_on


def test_a_client_that_reads_much_waits_behind_itself_alone() -> None:
    async def test() -> list[str]:
        done: list[str] = []
        async with busy("greedy") as (threads, running, goes_on):
            names = ["greedy"] * 5 + ["ann"] * 2 + ["bob"]
            calls = [asyncio.create_task(threads.run(name, partial(done.append, name))) for name in names]
            await asyncio.sleep(0)  # all are queued
            goes_on.set()
            await asyncio.gather(running, *calls)
        return done

    assert asyncio.run(test()) == ["greedy", "ann", "bob", "greedy", "ann", *["greedy"] * 3]


def test_a_client_that_gives_up_some_of_its_turns_has_the_next_one() -> None:
    async def test(*, given_up_late: bool) -> list[str]:
        done: list[str] = []
        async with busy("ann") as (threads, running, goes_on):
            names = ["bob given up", "bob", "eve"]
            calls = [asyncio.create_task(threads.run(name[:3], partial(done.append, name))) for name in names]
            await asyncio.sleep(0)  # all are queued
            if given_up_late:  # at the moment of its scheduling
                threads._release()
            calls[0].cancel()
            goes_on.set()
            await asyncio.wait([running, *calls])
        return done

    assert asyncio.run(test(given_up_late=False)) == ["bob", "eve"]
    assert asyncio.run(test(given_up_late=True)) == ["bob", "eve"]


def test_a_walk_gives_its_thread_up_between_steps_and_returns_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STEP_SECONDS", 0.0)

    async def test() -> list[str]:
        done: list[str] = []
        begun, goes_on = threading.Event(), threading.Event()

        def way() -> Generator[None, None, str]:
            begun.set()
            goes_on.wait()
            yield
            done.append("ann")
            return "found"

        with ReadThreads(1) as threads:
            walk = asyncio.create_task(threads.walk("ann", way()))
            await asyncio.to_thread(begun.wait)
            other = asyncio.create_task(threads.run("bob", lambda: done.append("bob")))
            await asyncio.sleep(0)  # it is queued
            goes_on.set()
            assert await walk == "found"
            await other
        return done

    assert asyncio.run(test()) == ["bob", "ann"]


def test_clients_that_leave_give_up_their_turns_and_keep_the_threads_that_they_are_in() -> None:
    async def test() -> None:
        async with busy("ann") as (threads, running, goes_on):
            waiting = [asyncio.create_task(threads.run("bob", lambda: "read")) for _ in range(3)]
            last = asyncio.create_task(threads.run("eve", lambda: "read"))
            await asyncio.sleep(0)
            for task in (running, waiting[0], waiting[2]):
                task.cancel()
            await asyncio.wait([running, waiting[0], waiting[2]])
            assert not waiting[1].done()
            goes_on.set()
            assert await waiting[1] == "read"
            assert await last == "read"
            assert [await threads.run("ann", lambda: number) for number in range(3)] == [0, 1, 2]  # noqa: B023

    asyncio.run(test())


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


def test_a_read_serves_all_that_waited_and_none_that_came_after_it_began() -> None:
    asyncio.run(_share())


async def _share() -> None:
    began, goes_on, reads = Event(), Event(), 0

    def read() -> int:
        nonlocal reads
        reads += 1
        found = reads
        began.set()
        assert goes_on.wait(10)
        return found

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


def test_an_error_is_raised_for_each_request() -> None:
    asyncio.run(_fail())


async def _fail() -> None:
    def read() -> int:
        raise OSError("gone")

    with ThreadPoolExecutor(1) as threads:
        shared = SharedRead(read, threads)
        for each in await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True):
            assert isinstance(each, OSError)
        with pytest.raises(OSError, match="gone"):
            await shared.result()


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
