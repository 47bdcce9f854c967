"""Responses that end when their client leaves (streams, late and large ones), and compression."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from wald_gate.http.exchange import Exchange
from wald_gate.shapes import encoded

T = TypeVar("T")
SILENT_SECONDS = 15.0
"""Time after which a waiting response sends a heartbeat, so that no proxy closes its connection."""
UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Headers that turn off the response buffering of nginx."""
LEVEL = 1  # higher levels use several times the CPU and save a tenth
_SMALL_BYTES = 64 << 10  # sent without waiting for the client
_BYTES_MIN = 1024  # a shorter response fits into a packet anyway
_MEDIA_TYPES = ("application/json", "application/x-ndjson", "text/plain")  # no pages: these have secrets of sessions
_NOT_WANTED = re.compile(r"[ \t]*q[ \t]*=[ \t]*0(\.0*)?[ \t]*", re.IGNORECASE)


async def while_there(request: Exchange, waiting: Coroutine[None, None, T]) -> T:
    """Return the result of ``waiting``; cancel it if the client leaves."""
    waits, leaving = asyncio.create_task(waiting), asyncio.create_task(request.receive())
    try:
        await asyncio.wait((waits, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waits.done():
            raise ClientDisconnect
        return waits.result()
    finally:
        waits.cancel()
        leaving.cancel()


class Json(Response):
    """An object as JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encoded(content)

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        if headers:
            super().init_headers(headers)
        else:  # a quarter of the time
            self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]


class Stream(StreamingResponse):
    """A response in parts, possibly endless; only its headers in answer to HEAD."""

    def __init__(self, parts: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):  # starlette does not if the client leaves
            if scope["method"] == "HEAD":
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body"})
            else:
                await super().__call__(scope, receive, send)


class Late(Response):
    """A JSON response that is not ready yet; until it is, periodic newlines keep the connection alive.

    It is cancelled if the client leaves.
    """

    def __init__(self, coming: asyncio.Task[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type, headers=UNBUFFERED)
        del self.headers["content-length"]
        self._coming = coming

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


class FlushedResponse(Response):
    """A possibly large response in one piece, which ends once the client has received nearly all of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= _SMALL_BYTES:
            await super().__call__(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send({"type": "http.response.body"})  # waits until the connection has sent everything


def wants_gzip(request: Request) -> bool:
    for each in request.headers.get("accept-encoding", "").split(","):
        name, _, weight = each.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip"):
            return not _NOT_WANTED.fullmatch(weight)
    return False


def may_compress(response: Response) -> bool:
    """Return True if this kind of response is compressed, in which case it gets a Vary header."""
    if type(response) not in (Response, Json) or response.status_code != 200:
        return False
    if (response.media_type or "").partition(";")[0] not in _MEDIA_TYPES:
        return False
    response.raw_headers.append((b"vary", b"Accept-Encoding"))
    return len(response.body) >= _BYTES_MIN


def compress(response: Response) -> None:
    response.body = gzip.compress(bytes(response.body), LEVEL, mtime=0)
    response.headers["content-length"] = str(len(response.body))
    response.headers["content-encoding"] = "gzip"
