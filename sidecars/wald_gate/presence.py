"""Clients that leave while their request waits, or while its answer goes on: what was taken up for them is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
SILENT_SECONDS = 15.0
"""After which an answer that waits sends something, so that no proxy takes its connection for dead."""
UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Headers with which nginx passes on each part of an answer at once."""
_SMALL_BYTES = 64 << 10  # are no matter of memory, and cost one step less


async def gone(request: Request) -> None:
    """Return when the client has closed its connection; its body was read before, or is of no use."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_there(request: Request, waiting: Coroutine[None, None, T]) -> T:
    """What ``waiting`` returns, if the client waits for it.

    Raises:
        ClientDisconnect: the client has gone, and ``waiting`` is cancelled.
    """
    waits, leaving = asyncio.create_task(waiting), asyncio.create_task(gone(request))
    try:
        await asyncio.wait((waits, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waits.done():
            raise ClientDisconnect
        return waits.result()
    finally:
        waits.cancel()
        leaving.cancel()


class Stream(StreamingResponse):
    """An answer in parts, which may have no end. HEAD is answered with its headers alone.

    Args:
        end: is called when the answer is over, in whichever way.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        media_type: str,
        headers: Mapping[str, str],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts = parts
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._parts):  # nothing else does it where the client takes nothing
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    await send({"type": "http.response.body"})
                else:
                    await super().__call__(scope, receive, send)
        finally:
            self._end()


class Late(Response):
    """A JSON answer that is not ready yet; until it is, periodic newlines keep the connection alive.

    Args:
        coming: the pending answer; cancelled if the client leaves.
        end: called when the answer has ended, even after an error.
    """

    def __init__(self, coming: asyncio.Task[bytes], media_type: str, end: Callable[[], None]) -> None:
        super().__init__(media_type=media_type, headers=UNBUFFERED)
        del self.headers["content-length"]
        self._coming = coming
        self._end = end

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not self._coming.done():
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                await asyncio.wait((self._coming,), timeout=SILENT_SECONDS)
            with suppress(ClientDisconnect):
                await send({"type": "http.response.body", "body": self._coming.result(), "more_body": True})
                await send({"type": "http.response.body"})  # waits until the connection has sent everything
        finally:
            self._coming.cancel()
            self._end()


class Taken(Response):
    """An answer in one piece, which may be large: it ends when the client has taken nearly all of it.

    Args:
        end: is called then, or when the client has gone.
    """

    def __init__(self, body: bytes, media_type: str, end: Callable[[], None]) -> None:
        super().__init__(body, media_type=media_type)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if len(self.body) <= _SMALL_BYTES:
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send({"type": "http.response.body"})  # waits until the connection has sent everything
        finally:
            self._end()
