"""One request and its response: the headers and the body as they arrive, and the answer as it is sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Scope

from wald_gate.limits import Allowance, ConnectionPool, Ended
from wald_gate.problems import HttpError

UNSENT_BYTES = 256 << 10  # of a response, buffered by its transport
STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
STATUS_LINES[499] = b"HTTP/1.1 499 \r\n"
_STEP_BYTES = 64 << 10  # of a body, which have to arrive within body_timeout
_BODY_BYTES = 128 << 10  # of a body, buffered before reading pauses
_JOINED_BYTES = 64 << 10  # of a body, copied behind its head
_NO_BODY = (204, 304)
_COMMON = (
    b"x-content-type-options: nosniff\r\n"
    b"cross-origin-resource-policy: same-origin\r\n"
    b"referrer-policy: same-origin\r\n"  # with no-referrer, Chromium sends "Origin: null" with a form
)
_log = logging.getLogger("wald_gate")


class Channel(asyncio.Protocol):
    """An exchange's view of the data flow from and to a client."""

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self._loop = asyncio.get_running_loop()
        self.can_write = asyncio.Event()  # set unless the client has to read first
        self.can_write.set()
        self._is_reading = True
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when that timer was started

    def pause_writing(self) -> None:
        self.can_write.clear()
        if self._send_timer is None:
            self._await_sending()

    def resume_writing(self) -> None:
        if self._send_timer is not None and not self.transport.is_closing():
            self._send_timer.cancel()
            self._send_timer = None
        self.can_write.set()

    def write(self, data: bytes) -> None:
        """Send data, unless the connection is being closed."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_reading(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def end_response(self, exchange: Exchange) -> None:
        """Continue with the next request once a response is complete."""
        raise NotImplementedError

    def end_run(self, exchange: Exchange) -> None:
        """Close the connection if the application has returned without a complete response."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Close the connection in the middle of an answer, so that the client does not consider it complete."""
        raise NotImplementedError

    def _abort(self, reason: Ended) -> None:
        self.pool.ended[reason] += 1
        self.transport.abort()

    def _await_sending(self) -> None:
        """Abort the connection if the client reads nothing for ``send_timeout``."""
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self._loop.call_later(self.pool.limits.send_timeout, self._check_sending)

    def _check_sending(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_sending()
        else:
            self._abort(Ended.SEND_TIME)


class _Headers(Headers):
    """Headers in a dict, because Starlette scans a list for each look-up; the first of several equal names counts."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._list = headers
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(headers)}

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower()]

    def __contains__(self, key: object) -> bool:
        return key in self._first

    def get(self, key: str, default: Any = None) -> Any:
        return self._first.get(key, default)

    def getlist(self, key: str) -> list[str]:
        return super().getlist(key) if key in self._first else []


class Exchange(Request):
    """A request and its response; also the ``receive`` and ``send`` that Starlette's responses call."""

    allowance: Allowance | None = None  # of its client; None before it is authenticated
    at_end: Callable[[], None] | None = None  # called when the response is sent or the client has left
    has_whole_body = False
    has_left = False  # the client
    rejection: Response | None = None  # sent by the connection in place of the application's, for an invalid body
    is_started = False  # the response
    is_complete = False
    task: asyncio.Task[None] | None = None  # runs the application
    _body_bytes = 0
    _news: asyncio.Event | None = None  # made when the application waits
    _chunked = False
    _left: int | None = None  # of the content-length
    _unsent_head = b""  # leaves with the body, whose length it names

    def __init__(self, connection: Channel, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        self.connection = connection
        self.scope = scope
        self._headers = _Headers(scope["headers"])
        self.keep_alive = keep_alive  # after the response
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []

    @property
    def headers(self) -> Headers:
        return self._headers

    async def run(self, application: Application) -> None:
        """Run the application; an error closes the connection."""
        try:
            await application(self)
        except Exception:  # noqa: BLE001 - a bug: the log shows it, and the gate keeps running
            _log.exception("%s %s", self.scope["method"], self.scope["path"])
        finally:
            self.connection.end_run(self)

    def feed(self, body: bytes) -> bool:
        """Add a part of the body; return True if the client should send no more for now."""
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._news is not None and self._body_bytes >= _STEP_BYTES:
            self._news.set()
        return self._body_bytes > _BODY_BYTES

    def end_body(self) -> None:
        self.has_whole_body = True
        self._notify()

    def disconnect(self) -> None:
        self.has_left = True
        self._notify()

    @property
    def is_read(self) -> bool:
        """Return True if the application has the whole body."""
        return self.has_whole_body and not self._parts

    async def chunk(self, *, is_counted: bool = True) -> bytes:
        """Return the next part of the body, or b"" at its end; raise HttpError 408 if it does not arrive in time.

        Unless ``is_counted``, the bytes do not count against the client: a compressed body counts decompressed.
        """
        if self._expects_continue:
            self._expects_continue = False
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.has_whole_body:
            await self._wait_for_body()
        if self.has_left:
            raise ClientDisconnect
        body = b"".join(self._parts)
        self._parts.clear()
        self._body_bytes = 0
        self.connection.resume_reading()
        if is_counted and self.allowance is not None:
            self.allowance.sent_bytes -= len(body)
        return body

    async def read(self, most: int, what: str = "a body of JSON") -> bytes:
        """Read a small body; raise HttpError 413 if it has more than ``most`` bytes."""
        body = bytearray()
        while True:
            body += await self.chunk()
            if len(body) > most:
                raise HttpError(413, "too-large", f"{what} may have at most {most} bytes")
            if self.is_read:
                return bytes(body)

    async def _wait_for_body(self) -> None:
        """Wait for 64 KiB of the body or its end."""
        seconds = self.connection.pool.limits.body_timeout
        try:
            async with asyncio.timeout(seconds):
                while not (self._body_bytes >= _STEP_BYTES or self.has_whole_body or self.has_left):
                    await self._wait()
        except TimeoutError:
            message = f"in {seconds:g} s less than {_STEP_BYTES} bytes of the body came"
            raise HttpError(408, "timeout", message, headers={"Connection": "close"}) from None

    async def receive(self) -> Message:
        """Wait until the client has left or the response is complete; discard the rest of the body."""
        while not (self.has_left or self.is_complete):
            self._parts.clear()
            self._body_bytes = 0
            await self._wait()
        return {"type": "http.disconnect"}

    async def answer(self, response: Response) -> None:
        """Send a response; a response in one piece takes one system call."""
        if type(response).__call__ is Response.__call__ and self.connection.can_write.is_set():
            if not self.has_left:
                self._unsent_head = self._head(response.status_code, response.raw_headers)
                self.is_started = True
                self._send_body(response.body, is_last=True)
        else:
            await response(self.scope, self.receive, self.send)

    async def send(self, message: Message) -> None:
        """Send the head of the response, or a part of its body; wait while the client does not read."""
        connection = self.connection
        if not connection.can_write.is_set() and not self.has_left:
            await connection.can_write.wait()
        if self.has_left:
            return
        if not self.is_started:
            head = self._head(message["status"], message["headers"])
            self.is_started = True
            if self._left is None:
                connection.write(head)
            else:
                self._unsent_head = head
        elif self.is_complete:
            raise RuntimeError("the response is complete")
        else:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))

    def _notify(self) -> None:
        """Wake the application if it is waiting for the client."""
        if self._news is not None:
            self._news.set()

    async def _wait(self) -> None:
        self.connection.resume_reading()
        if self._news is None:
            self._news = asyncio.Event()
        self._news.clear()
        await self._news.wait()

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        parts = [STATUS_LINES[status], common_headers(int(time.time()))]
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and value != b"close"
                continue
            parts.append(b"%b: %b\r\n" % (name, value))
        if self._left is None and self.scope["method"] != "HEAD" and status not in _NO_BODY:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # the end of the connection ends the answer (RFC 9112, section 6.3)
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        head = b"".join(parts)
        if not head.count(b"\n") == head.count(b"\r") == len(parts) + _COMMON.count(b"\n"):
            raise RuntimeError("a line break in a header of the response")
        return head

    def _send_body(self, body: bytes | memoryview, *, is_last: bool) -> None:
        data = bytes(body)
        if self.scope["method"] == "HEAD":
            data, self._left = b"", 0
        elif self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if is_last:
                data += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the response is not as long as its content-length")
        if self._unsent_head and len(data) > _JOINED_BYTES:
            self.connection.write(self._unsent_head)
        elif self._unsent_head:
            data = self._unsent_head + data
        self._unsent_head = b""
        if data:
            self.connection.write(data)
        if is_last:
            self.is_complete = True
            self._notify()
            self.connection.end_response(self)


Application = Callable[[Exchange], Awaitable[None]]
"""Answers a request."""


@lru_cache(2)
def common_headers(now: int) -> bytes:
    return b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n" + _COMMON
