"""One HTTP/1.1 connection: parses requests, runs the ASGI application, and enforces the limits of docs/http.md.

The parser is httptools, used through its documented callbacks. All state of a connection lives in
:class:`Connection`: at most one exchange is being answered, and pipelined requests wait in a bounded queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from wald_gate.auth.clients import CERTIFICATE, PEER
from wald_gate.http.pool import ConnectionPool, Ended
from wald_gate.limits import COMPLETE

BREAK_OFF = "wald.break-off"
"""Key in the scope of a function that ends the connection in the middle of an answer."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
_HEADER_BYTES = 4  # around a name and a value
_JOINED_BYTES = 64 << 10  # written at once, without waiting for the end of the round
_BODY_BYTES = 64 << 10  # of a body, buffered before reading pauses
_UNSENT_BYTES = 256 << 10  # of a response, buffered by its transport
_PIPELINED = 64  # requests behind the one that is being answered
_REST_BYTES = 64 << 20  # of a body, read after the answer
_NO_BODY = (204, 304)
_COMMON = (
    b"x-content-type-options: nosniff\r\n"
    b"cross-origin-resource-policy: same-origin\r\n"
    b"referrer-policy: same-origin\r\n"  # with no-referrer, Chromium sends "Origin: null" with a form
)
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
_STATUS_LINES[499] = b"HTTP/1.1 499 \r\n"
_log = logging.getLogger("wald_gate")


class JoinedWrites:
    """A transport that sends everything written in one round of the event loop with one system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._buffer: list[bytes | bytearray | memoryview] = []
        self._buffered_bytes = 0
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` at the end of the round, or now if much has been written."""
        if not self._buffer:
            self._call_soon(self.flush)
        self._buffer.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes >= _JOINED_BYTES:
            self.flush()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not sent yet."""
        return self._buffered_bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the transport once everything is sent."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send the buffered data now."""
        if self._buffer:
            buffer, self._buffer, self._buffered_bytes = self._buffer, [], 0
            if not self._transport.is_closing():  # it may have been lost in this round
                self._transport.writelines(buffer)


class Exchange:
    """One request and its response: the ``receive`` and ``send`` of ASGI.

    Attributes:
        is_disconnected: the client has left.
        is_started, is_complete: state of the response.
        keep_alive: the connection stays open after the response.
        task: runs the application.
    """

    def __init__(self, connection: Connection, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._has_whole_body = False
        self._has_news = False
        self._news: asyncio.Event | None = None  # made when the application waits
        self.task: asyncio.Task[None] | None = None
        self.is_disconnected = False
        self.is_started = False
        self.is_complete = False
        self._chunked = False
        self._left: int | None = None  # of the content-length

    async def run(self, application: ASGIApp) -> None:
        """Run the application; an error closes the connection."""
        try:
            await application(self.scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - a bug: the log shows it, and the gate keeps running
            _log.exception("%s %s", self.scope["method"], self.scope["path"])
        finally:
            self._connection.end_run(self)

    def feed(self, body: bytes) -> bool:
        """Add a part of the body; return True if the client should send no more for now."""
        self._body.append(body)
        self._body_bytes += len(body)
        self.notify()
        return self._body_bytes > _BODY_BYTES

    def end_body(self) -> None:
        """Record that the whole body has arrived."""
        self._has_whole_body = True
        self.scope[COMPLETE] = True
        self.notify()

    def disconnect(self) -> None:
        """Record that the client has left."""
        self.is_disconnected = True
        self.notify()

    def notify(self) -> None:
        """Wake the application if it waits in :meth:`receive`."""
        self._has_news = True
        if self._news is not None:
            self._news.set()

    async def receive(self) -> Message:
        """Return the next part of the body, or ``http.disconnect``."""
        if self._expects_continue:
            self._expects_continue = False
            self._connection.write_continue()
        if not (self._has_news or self.is_disconnected or self.is_complete):
            self._connection.resume_reading()
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            await self._news.wait()
        self._has_news = False
        if self.is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body = b"".join(self._body)
        self._body, self._body_bytes = [], 0
        self._connection.resume_reading()
        return {"type": "http.request", "body": body, "more_body": not self._has_whole_body}

    async def send(self, message: Message) -> None:
        """Send the head of the response, or a part of its body; waits while the client does not read."""
        connection = self._connection
        if not connection.can_write.is_set() and not self.is_disconnected:
            await connection.can_write.wait()
        if self.is_disconnected:
            return
        if not self.is_started:
            head = self._head(message["status"], message["headers"])
            self.is_started, self._expects_continue = True, False
            connection.transport.write(head)
        elif self.is_complete:
            raise RuntimeError("the response is complete")
        else:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        parts = [_STATUS_LINES[status], _common_headers(int(time.time()))]
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

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        write = self._connection.transport.write
        if self.scope["method"] == "HEAD":
            self._left = 0
        elif self._chunked:
            if body:
                write(b"%x\r\n%b\r\n" % (len(body), body))
            if is_last:
                write(b"0\r\n\r\n")
        elif body:
            if self._left is not None:
                self._left -= len(body)
            write(body)
        if self._left is not None and (self._left < 0 or (is_last and self._left)):
            raise RuntimeError("the response is not as long as its content-length")
        if is_last:
            self.is_complete = True
            self.notify()
            self._connection.end_response(self)


class Connection(asyncio.Protocol):
    """A connection of a client.

    Attributes:
        client_place: the name under which the pool counts it; "" until then. A TLS connection is counted before its
            handshake, by the listener.
        is_made: it is responsible for its place in the pool.
        can_write: set unless the client has to read first.
    """

    transport: JoinedWrites

    def __init__(self, application: ASGIApp, pool: ConnectionPool) -> None:
        self._application = application
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.client_place = ""
        self.is_made = False
        self.can_write = asyncio.Event()
        self.can_write.set()
        self._is_reading = True
        self._peer: int | None = None
        self._certificate: str | None = None
        self._parser = self._new_parser()
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None  # the last one whose head has arrived
        self._queue: deque[Exchange] = deque()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._head_bytes = 0
        self._is_in_head = True
        self._is_between = True  # nothing of the next request has arrived
        self._plain_head = b""  # of a request for another protocol, without that
        self._is_refused = False  # nothing more is parsed
        self._rest_bytes: int | None = None  # received after the answer: of its body, or before the connection ends
        self._timer: asyncio.TimerHandle | None = None  # for data from the client
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when that timer was started
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is one
        self.transport = JoinedWrites(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        tls = transport.get_extra_info("ssl_object")
        self._peer, self._certificate = _peer_of(transport), _certificate_of(transport)
        is_unix = self._peer is not None
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if tls is None else "https",
            "client": None if is_unix else (str(client[0]), int(client[1])) if client else None,
            "server": (server, None) if is_unix else (str(server[0]), int(server[1])) if server else None,
            "root_path": "",
            BREAK_OFF: self._break_off,
        }
        if is_unix:
            self._scope[PEER] = self._peer
        self._pool.open.add(self)
        self.is_made = True
        if not self.client_place:
            self.client_place = f"user {self._peer}" if is_unix else str((self._scope["client"] or ("",))[0])
            if not self._pool.enter(self.client_place):
                transport.abort()
                return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        for timer in (self._timer, self._send_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._pool.open.discard(self)
        if self.is_made:
            self._pool.leave(self.client_place)
        self._pool.idle.pop(self, None)
        for exchange in (self._answering, self._receiving):
            if exchange is not None and not exchange.is_complete:
                exchange.disconnect()
        self._queue.clear()
        self.can_write.set()

    def eof_received(self) -> None:
        self._close()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._receive(data)
        elif self._rest_bytes is not None:
            self._pass_over(len(data), self._rest_bytes)

    def pause_writing(self) -> None:
        self.can_write.clear()
        if self._send_timer is None:
            self._await_sending()

    def resume_writing(self) -> None:
        if self._send_timer is not None and not self.transport.is_closing():
            self._send_timer.cancel()
            self._send_timer = None
        self.can_write.set()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._is_between = False
        self._head_bytes = max(1, self._head_bytes)  # it may have arrived in one read with the end of another request
        self._url, self._headers, self._expects_continue = b"", [], False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # trailers are ignored; they are counted as they arrive
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = self._parser.get_http_version() == "1.1"  # RFC 9110, section 10.1.1
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._timer is not None:
            self._set_timer(None)
        self._rest_bytes = None
        if self._is_refused:
            return
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        if parser.should_upgrade():
            lines = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade")
            line = parser.get_method(), self._url, version.encode()
            self._plain_head = b"%b %b HTTP/%b\r\n%b\r\n" % (*line, lines)
            return
        size, hosts, codings = len(self._url), 0, []
        for name, value in headers:
            size += len(name) + len(value) + _HEADER_BYTES
            hosts += name == b"host"
            if name == b"transfer-encoding":
                codings.append(value.strip().lower())
        if size > self._pool.limits.head_max_bytes:  # it arrived with its end, in one read
            self._refuse(Ended.HEAD_SIZE, 431)
        elif hosts > 1 or (not hosts and version == "1.1"):  # RFC 9112, section 3.2
            self._refuse(Ended.HOST, 400)
        elif version not in ("1.0", "1.1"):
            self._reject(400, b"")
        elif codings not in ([], [b"chunked"]):  # RFC 9112, section 6.1
            self._reject(501, b"")
        elif len(self._queue) == _PIPELINED:
            self._is_refused = True
            self._pool.ended[Ended.PIPELINED] += 1
            assert self._receiving is not None
            self._receiving.keep_alive = False  # its answer, the last one, announces the end of the connection
        else:
            self._begin(version)
            self._is_in_head, self._head_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        exchange = self._receiving
        if not self._is_refused and exchange is not None and not exchange.is_complete and exchange.feed(body):
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._is_refused or self._parser.should_upgrade():
            return
        self._is_in_head, self._is_between, self._head_bytes = True, True, 0
        exchange = self._receiving
        if exchange is None:
            return
        if not self._parser.should_keep_alive():  # a trailer may say so
            exchange.keep_alive = False
        if not exchange.is_complete:
            exchange.end_body()
        elif not exchange.keep_alive:
            self._is_refused = True
            self._close()

    # Called by exchanges.

    def write_continue(self) -> None:
        """Ask the client for the body."""
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def resume_reading(self) -> None:
        """Read from the client again."""
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def end_response(self, exchange: Exchange) -> None:
        """Continue with the next request once a response is complete."""
        if not exchange.keep_alive:
            if self._is_refused or (exchange is self._receiving and not self._is_in_head):
                self._linger()
            else:
                self._close()
            return
        if len(self._pool.open) - len(self._pool.idle) == 1:
            # Next to other busy connections the response leaves with theirs: their clients then ask again together,
            # and share a sync.
            self.transport.flush()
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self._queue:
            self._start(self._queue.popleft())
        elif self._is_in_head and not self._head_bytes:
            self._wait_for_head()
        else:
            self._rest_bytes = None if self._is_in_head else 0
            self._set_timer(self._pool.limits.head_timeout)

    def end_run(self, exchange: Exchange) -> None:
        """Close the connection if the application has returned without a complete response."""
        assert exchange.task is not None
        self._pool.tasks.discard(exchange.task)
        if not (exchange.is_complete or exchange.is_disconnected):
            if not exchange.is_started:
                self._write_bare(500, b"")
            self._end()

    # Called by the server.

    def evict(self) -> None:
        self.transport.abort()

    def has_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def shut_down(self) -> None:
        if self._receiving is None or self._receiving.is_complete:
            self._close()
        else:
            self._receiving.keep_alive = False

    def distrust(self) -> None:
        if self._certificate is None:
            return
        self._certificate = None
        for exchange in (self._answering, *self._queue):
            if exchange is not None:
                exchange.scope.pop(CERTIFICATE, None)
        self.shut_down()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A request after "close" is ignored, not an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _receive(self, data: bytes) -> None:
        if self._is_between and not data.strip(b"\r\n"):  # RFC 9112, section 2.2
            return
        self._pool.idle.pop(self, None)
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter: CONNECT
            if not self._is_refused:
                self._reject(400, b"Invalid HTTP request received.")
        if self._is_refused:
            return
        if self._rest_bytes is not None:
            self._pass_over(len(data), self._rest_bytes)
        if self._head_bytes and not self.transport.is_closing():
            if self._head_bytes > self._pool.limits.head_max_bytes:
                self._refuse(Ended.HEAD_SIZE, 431)
            elif self._is_in_head and self._timer is None and self._has_answered():
                self._set_timer(self._pool.limits.head_timeout)  # otherwise it starts when the answer is complete

    def _parse(self, data: bytes) -> None:
        """Parse; a request for another protocol is answered as if it had not asked for it (RFC 9110, section 7.8).

        The parser regards a request as complete where another protocol may begin. So its head is parsed again without
        the header Upgrade, and then what follows it.

        Raises:
            HttpParserError, HttpParserUpgrade: the request cannot be answered.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as asked:
                rest = rest[asked.args[0] :]
                if self._is_refused:
                    return
                self._parser = self._new_parser()  # after "close" the previous one reads nothing more
                self._parser.feed_data(self._plain_head)

    def _begin(self, version: str) -> None:
        """Run or queue the request whose head has arrived."""
        parser, url = self._parser, self._url
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path or b"/", parsed.query or b""
        path = raw_path.decode("ascii")
        scope = dict(self._scope)
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["headers"] = self._headers
        if self._certificate is not None:
            scope[CERTIFICATE] = self._certificate
        keep_alive = version == "1.1" and parser.should_keep_alive()
        exchange = Exchange(self, scope, keep_alive=keep_alive, expects_continue=self._expects_continue)
        self._receiving = exchange
        if self._has_answered():
            self._start(exchange)
        else:
            self._pause_reading()
            self._queue.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._answering = exchange
        exchange.task = self._loop.create_task(exchange.run(self._application))
        self._pool.tasks.add(exchange.task)

    def _has_answered(self) -> bool:
        return not self._queue and (self._answering is None or self._answering.is_complete)

    def _pause_reading(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self._is_reading = False
            self.transport.pause_reading()

    def _wait_for_head(self) -> None:
        if self.transport.is_closing():
            return
        self._pool.idle[self] = None
        self._pool.idle.move_to_end(self)
        self._idle_since = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._pool.limits.idle_timeout, self._check_idle)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle for too long; otherwise check again when that may be so."""
        self._idle_timer = None
        if self in self._pool.idle:
            left = self._idle_since + self._pool.limits.idle_timeout - self._loop.time()
            if left <= 0:
                self._close()
            else:
                self._idle_timer = self._loop.call_later(left, self._check_idle)

    def _pass_over(self, count: int, before: int) -> None:
        """Count bytes that arrive after the answer: of its body, or until the client closes the connection."""
        self._rest_bytes = before + count
        if self._is_in_head and not self._is_refused:  # this was the end of the body
            self._rest_bytes = None
            self._set_timer(None)
            self._wait_for_head()
        elif self._rest_bytes > _REST_BYTES:
            self._abort(Ended.REST)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self._is_refused:
            self._close()
        elif self._is_in_head:
            self._refuse(Ended.HEAD_TIME, 408)
        else:
            self._abort(Ended.REST)

    def _abort(self, reason: Ended) -> None:
        self._pool.ended[reason] += 1
        self.transport.abort()

    def _refuse(self, reason: Ended, status: int) -> None:
        self._pool.ended[reason] += 1
        self._reject(status, b"")

    def _reject(self, status: int, text: bytes) -> None:
        """Answer the request that is being received, if nothing of its answer was sent, and close the connection."""
        self._is_refused = True
        if self._has_answered() if self._is_in_head else self._is_unanswered():
            self._write_bare(status, text)
            self._linger()
        else:
            self._end()

    def _write_bare(self, status: int, text: bytes) -> None:
        kind = b"content-type: text/plain; charset=utf-8\r\n" if text else b""
        end = b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
        self.transport.write(_STATUS_LINES[status] + _common_headers(int(time.time())) + kind + end)

    def _is_unanswered(self) -> bool:
        """Return True if the only request is the one that is being received, and its response has not started."""
        return not self._queue and self._receiving is not None and not self._receiving.is_started

    def _end(self) -> None:
        """Close; an answer in flight is cut off, so that nothing is taken for the rest of it."""
        if self._answering is None or self._answering.is_complete or not self._answering.is_started:
            self._close()
        else:
            self.transport.abort()

    def _close(self) -> None:
        """Close the connection once everything is sent, or the client has read nothing of it for ``send_timeout``."""
        self.transport.close()
        self._set_timer(None)
        if self._send_timer is None and self in self._pool.open:
            self._await_sending()

    def _linger(self) -> None:
        """Send the answer, and read on before closing: unread data would reset the connection, and lose the answer."""
        # TLS cannot close one direction, so a client that waits for the end of the connection would wait long.
        if not self.transport.can_write_eof() and self._is_refused:
            self._close()
        elif not self.transport.is_closing():
            self.transport.flush()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._rest_bytes = 0
            self.resume_reading()
            self._set_timer(self._pool.limits.head_timeout)

    def _await_sending(self) -> None:
        """Abort the connection if the client reads nothing for ``send_timeout``."""
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self._loop.call_later(self._pool.limits.send_timeout, self._check_sending)

    def _check_sending(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_sending()
        else:
            self._abort(Ended.SEND_TIME)

    def _break_off(self) -> None:
        """Close the connection in the middle of an answer, so that the client does not take the answer for complete."""
        answering = self._answering
        if answering is not None and answering.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self._close()  # the last chunk is missing
        else:
            self.transport.abort()


@lru_cache(2)
def _common_headers(now: int) -> bytes:
    return b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n" + _COMMON


def _peer_of(transport: asyncio.Transport) -> int | None:
    """Return the user at the other end of a unix socket."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _certificate_of(transport: asyncio.Transport) -> str | None:
    """Return the name in the client's certificate; None without a certificate, or if it does not have exactly one name.

    The name is the common name or, without one, the only subjectAltName.
    """
    connection = transport.get_extra_info("ssl_object")
    shown = (connection.getpeercert() if connection is not None else None) or {}
    names = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
    names = names or [value for _, value in shown.get("subjectAltName", ())]
    return str(names[0]) if len(names) == 1 else None
