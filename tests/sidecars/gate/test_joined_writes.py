"""What is kept for the end of a round is sent in one piece, or dropped with the connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop

from wald_gate.http.connection import JoinedWrites


def test_what_is_kept_when_the_connection_is_lost_is_dropped() -> None:
    """Without an error in the loop, which would go to stderr as a traceback."""
    wrong: list[Any] = []

    async def lose() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        here, there = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=here)
        joined = JoinedWrites(transport)
        joined.abort()
        for _ in range(5):  # by then the system's handle is gone, too
            joined.write(b"kept")
            await asyncio.sleep(0)
        there.close()

    uvloop.run(lose())

    assert wrong == []
