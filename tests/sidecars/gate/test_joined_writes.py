"""Writes buffered during a loop iteration are sent in one piece, or dropped with the connection.

A head that cannot be written becomes a 500.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from wald_gate.http.connection import Connection, JoinedWrites
from wald_gate.http.pool import ConnectionPool
from wald_gate.settings import LimitSettings


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


def test_a_head_that_cannot_be_written_is_answered_with_500() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c")]})

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
