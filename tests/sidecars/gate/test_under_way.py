"""What is under way to a daemon that does not answer: a number of requests, nothing of those that were given up."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from wald.errors import Unavailable
from wald_gate.incoming.daemon import Daemon

BIG = 1 << 20


class Silent:
    """Takes requests, answers no ``PUB``, and counts.

    Attributes:
        publishes: all that came, over connections that are open.
        questions: how often STAT was asked.
    """

    def __init__(self) -> None:
        self.publishes = self.questions = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what comes over a connection."""
        while line := await reader.readline():
            if line == b"STAT\n":
                self.questions += 1
                writer.write(b"OK {}\n")
            elif line.startswith(b"PUB "):
                self.publishes += 1
        writer.close()


@asynccontextmanager
async def silent(path: Path) -> AsyncIterator[Silent]:
    found = Silent()
    server = await asyncio.start_unix_server(found.take, path)
    async with server:
        yield found


async def given_up(daemon: Daemon, payloads: list[bytes]) -> None:
    """All of them are Unavailable."""
    answers = await asyncio.gather(
        *(daemon.publish("orders", payload, columns=False) for payload in payloads), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {Unavailable}


def test_so_many_are_sent_that_the_daemon_still_knows_each(tmp_path: Path) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = Daemon(tmp_path, tmp_path / "socket", patience=0.5)
            await given_up(gate, [b"x\n"] * 300)
            assert daemon.publishes == 256
            await gate.close()

    asyncio.run(ask())


def test_why_a_daemon_does_not_answer_is_asked_once_for_all(tmp_path: Path) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = Daemon(tmp_path, tmp_path / "socket", patience=0.5)
            await given_up(gate, [b"x\n"] * 100)
            assert daemon.questions < 10
            await gate.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_kept_of_what_was_given_up(tmp_path: Path, is_there: bool) -> None:
    async def ask() -> None:
        gate = Daemon(tmp_path, tmp_path / "socket", patience=0.2)
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
