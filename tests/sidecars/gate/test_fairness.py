"""Reads are scheduled fairly between clients, and only reads wait for reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from wald_gate.records_out import threads as turns
from wald_gate.records_out.threads import ReadThreads


@asynccontextmanager
async def reading(client: str) -> AsyncIterator[tuple[ReadThreads, asyncio.Task[bool], threading.Event]]:
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
        async with reading("greedy") as (threads, running, goes_on):
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
        async with reading("ann") as (threads, running, goes_on):
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
        async with reading("ann") as (threads, running, goes_on):
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
