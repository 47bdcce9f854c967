"""Requests in flight to an unresponsive daemon: their number is limited, and abandoned ones keep no memory."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Event

import pytest
import uvloop
from running import TIMEOUT_SECONDS
from starlette.responses import Response

from wald.errors import Unavailable
from wald_gate.http.connection import Connection
from wald_gate.http.exchange import Exchange
from wald_gate.limits import ConnectionPool, Limits, MemoryReservation
from wald_gate.records_in.bodies import JsonLines
from wald_gate.records_in.daemon import DaemonClient
from wald_gate.settings import LimitSettings

BIG = 1 << 20


class Silent:
    """Fake daemon that accepts requests, never answers ``PUB``, and counts.

    Attributes:
        publishes: the number of PUB requests on all connections; routes: that number by route.
        questions: the number of STAT requests.
        busy: the busy routes in the response to STAT.
        open: the number of open connections.
    """

    def __init__(self) -> None:
        self.publishes = self.questions = self.open = 0
        self.busy: list[str] = []
        self.routes: Counter[str] = Counter()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read requests from a connection."""
        self.open += 1
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"STAT\n":
                    self.questions += 1
                    writer.write(b"OK %b\n" % json.dumps({"busy": self.busy}).encode())
                elif line.startswith(b"PUB "):
                    self.publishes += 1
                    self.routes[line.split()[1].decode()] += 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1


@asynccontextmanager
async def silent(path: Path) -> AsyncIterator[Silent]:
    found = Silent()
    server = await asyncio.start_unix_server(found.take, path, limit=2 * BIG)
    async with server:
        yield found
        while found.open:
            await asyncio.sleep(0.01)


async def given_up(daemon: DaemonClient, payloads: list[bytes]) -> None:
    """Check that all publishes fail with Unavailable."""
    answers = await asyncio.gather(
        *(daemon.publish("orders", payload, columns=False) for payload in payloads), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {Unavailable}


def test_so_many_are_sent_that_the_daemon_still_knows_each(tmp_path: Path) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=30)
            asked = [asyncio.create_task(gate.publish("orders", b"x\n", columns=False)) for _ in range(300)]
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while daemon.publishes < 256:
                    await asyncio.sleep(0.01)
            for _ in range(20):  # time for more requests to arrive
                await asyncio.sleep(0.001)
            assert daemon.publishes == 256
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            await gate.close()

    asyncio.run(ask())


def test_a_long_line_takes_no_thread_in_which_the_daemon_is_connected_to() -> None:
    """A task that ends only after the line is parsed occupies all of asyncio's default threads."""

    async def ask() -> None:
        parsed = Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        taken = loop.run_in_executor(None, parsed.wait, 30)
        with ThreadPoolExecutor(1) as threads:
            limits = LimitSettings(record_max_bytes=2 * BIG)
            lines = JsonLines(limits, MemoryReservation(Limits(limits)), threads)
            [line] = lines.feed(b'{"value": "%b"}\n' % (b"x" * BIG))
            [payload] = await lines.payloads(line)
            assert len(payload) > BIG
        parsed.set()
        assert await taken

    asyncio.run(ask())


def test_why_a_daemon_does_not_answer_is_asked_once_for_all(tmp_path: Path) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=0.5)
            await given_up(gate, [b"x\n"] * 100)
            assert daemon.questions < 10
            await gate.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_kept_of_what_was_given_up(tmp_path: Path, is_there: bool) -> None:
    async def ask() -> None:
        gate = DaemonClient(tmp_path, tmp_path / "socket", patience=0.2)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(5):
            await given_up(gate, [bytes([number]) * BIG for _ in range(5)])
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 8 * BIG
        await gate.close()

    async def ask_silent() -> None:
        async with silent(tmp_path / "socket"):
            await ask()

    tracemalloc.start()
    try:
        asyncio.run(ask_silent() if is_there else ask())
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_route_that_is_free_again_waits_for_no_other(tmp_path: Path) -> None:
    """It was queued behind more requests of the other route than are sent at a time."""

    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=20)
            daemon.busy = ["a", "b"]
            asked = [asyncio.create_task(gate.publish(route, b"x\n", columns=False)) for route in ["a"] * 300 + ["b"]]
            while daemon.routes["a"] < 512:  # on the first connection, then on the second
                await asyncio.sleep(0.01)
            assert daemon.routes["b"] == 0
            daemon.busy = ["a"]
            while not daemon.routes["b"]:
                assert not any(each.done() for each in asked)
                await asyncio.sleep(0.01)
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            await gate.close()

    asyncio.run(ask())


def test_a_head_that_cannot_be_written_is_answered_with_500() -> None:
    async def application(request: Exchange) -> None:
        await request.answer(Response(headers={"x": "a\r\nb: c"}))

    async def ask() -> bytes:
        here, there = socket.socketpair()
        pool = ConnectionPool(LimitSettings())
        await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(application, pool), here)
        reader, writer = await asyncio.open_connection(sock=there)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    assert uvloop.run(ask()).startswith(b"HTTP/1.1 500 ")
