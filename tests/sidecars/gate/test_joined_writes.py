"""Writes buffered during a loop iteration are sent in one piece, or dropped with the connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop

from wald_gate.http.connection import JoinedWrites


def test_what_is_kept_when_the_connection_is_lost_is_dropped() -> None:
    """The event loop logs no error, which would appear as a traceback on stderr."""
    wrong: list[Any] = []

    async def lose() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        here, there = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=here)
        joined = JoinedWrites(transport)
        joined.abort()
        for _ in range(5):  # the last writes come after the socket is closed
            joined.write(b"kept")
            await asyncio.sleep(0)
        there.close()

    uvloop.run(lose())

    assert wrong == []
