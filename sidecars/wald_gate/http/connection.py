"""One HTTP/1.1 connection: parses requests, runs the application, and enforces the limits of docs/http.md.

The parser is httptools, used through its documented callbacks. All state of a connection lives in
:class:`Connection`: at most one exchange is being answered, and pipelined requests wait in a bounded queue.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import unquote

import httptools
from starlette.responses import Response
from starlette.types import Scope

from wald_gate.auth.clients import CERTIFICATE, PEER
from wald_gate.http.exchange import STATUS_LINES, UNSENT_BYTES, Application, Channel, Exchange, common_headers
from wald_gate.limits import ConnectionPool, Ended
from wald_gate.problems import HttpError, problem

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
_HEADER_BYTES = 4  # around a name and a value
_PIPELINED = 64  # requests behind the one that is being answered
_REST_BYTES = 64 << 20  # of a body, read after the answer

LogResponse = Callable[[Scope, Response, float], None]
"""Logs a response that the connection itself sends, after a number of seconds."""


class Connection(Channel):
    """A connection of a client."""

    def __init__(self, application: Application, pool: ConnectionPool, log_response: LogResponse) -> None:
        super().__init__(pool)
        self._application = application
        self._log_response = log_response
        self.client_place = ""  # its name in the pool; the listener counts a TLS connection before its handshake
        self.is_made = False  # it is responsible for its place in the pool
        self._peer: int | None = None
        self._certificate: str | None = None
        self._parser = self._new_parser()
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None  # the last one whose head has arrived
        self._queue: deque[Exchange] = deque()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._is_in_head = True
        self._is_between = True  # nothing of the next request has arrived
        self._plain_head = b""  # of a request for another protocol, without that
        self._is_refused = False  # nothing more is parsed
        self._rest_bytes: int | None = None  # received after the answer: of its body, or before the connection ends
        self._timer: asyncio.TimerHandle | None = None  # for data from the client
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is one
        self.transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
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
        }
        if is_unix:
            self._scope[PEER] = self._peer
        self.pool.open.add(self)
        self.is_made = True
        if not self.client_place:
            self.client_place = f"user {self._peer}" if is_unix else str((self._scope["client"] or ("",))[0])
            if not self.pool.enter(self.client_place):
                transport.abort()
                return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        for timer in (self._timer, self._send_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self.pool.open.discard(self)
        if self.is_made:
            self.pool.leave(self.client_place)
        self.pool.idle.pop(self, None)
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

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._is_between = False
        self._head_bytes = max(1, self._head_bytes)  # it may have arrived in one read with the end of another request
        self._url, self._headers, self._trailer_bytes = b"", [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self._headers.append((name.lower(), value))
            return
        self._trailer_bytes += len(name) + len(value) + _HEADER_BYTES  # trailers are ignored
        if self._trailer_bytes > self.pool.limits.head_max_bytes and not self._is_refused:
            self._reject(self._head_size_error(), Ended.HEAD_SIZE)

    def on_headers_complete(self) -> None:
        if self._is_refused:  # the timer, if any, ends the connection
            return
        if self._timer is not None:
            self._set_timer(None)
        self._rest_bytes = None
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        if parser.should_upgrade():
            lines = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade")
            line = parser.get_method(), self._url, version.encode()
            self._plain_head = b"%b %b HTTP/%b\r\n%b\r\n" % (*line, lines)
            return
        size, hosts, codings, expects_continue = len(self._url), 0, [], False
        for name, value in headers:
            size += len(name) + len(value) + _HEADER_BYTES
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value.strip().lower())
            elif name == b"expect" and value.lower() == b"100-continue":
                expects_continue = version == "1.1"  # RFC 9110, section 10.1.1
        if size > self.pool.limits.head_max_bytes:  # it arrived with its end, in one read
            self._reject(self._head_size_error(), Ended.HEAD_SIZE)
        elif hosts > 1 or (not hosts and version == "1.1"):  # RFC 9112, section 3.2
            self._reject(HttpError(400, "host", f"a request needs one Host header; this one has {hosts}"), Ended.HOST)
        elif version not in ("1.0", "1.1"):
            self._reject(HttpError(400, "http-version", f"HTTP/{version} is not supported", hint="HTTP/1.1"))
        elif codings and codings != [b"chunked"]:  # RFC 9112, section 6.1
            self._reject(HttpError(501, "transfer-encoding", "the only Transfer-Encoding supported is chunked"))
        elif len(self._queue) == _PIPELINED:
            self._is_refused = True
            self.pool.ended[Ended.PIPELINED] += 1
            assert self._receiving is not None
            self._receiving.keep_alive = False  # its answer, the last one, announces the end of the connection
        else:
            self._begin(version, expects_continue=expects_continue)
            self._is_in_head, self._head_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        exchange = self._receiving
        if not self._is_refused and exchange is not None and not exchange.is_complete and exchange.feed(body):
            self.pause_reading()

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

    def end_response(self, exchange: Exchange) -> None:
        if not exchange.keep_alive:
            if self._is_refused or (exchange is self._receiving and not self._is_in_head):
                self._linger()
            else:
                self._close()
            return
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self._queue:
            self._start(self._queue.popleft())
        elif self._is_in_head and not self._head_bytes:
            self._wait_for_head()
        else:
            self._rest_bytes = None if self._is_in_head else 0
            self._set_timer(self.pool.limits.head_timeout)

    def end_run(self, exchange: Exchange) -> None:
        assert exchange.task is not None
        self.pool.tasks.discard(exchange.task)
        if not (exchange.is_complete or exchange.has_left):
            if not exchange.is_started:
                self._log_response(exchange.scope, self._send_problem(RuntimeError()), 0.0)
            self._end()

    # Called by the server.

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
        self.pool.idle.pop(self, None)
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter: CONNECT
            if not self._is_refused:
                self._reject(HttpError(400, "malformed", "this is not a valid HTTP request"))
        if self._is_refused:
            return
        if self._rest_bytes is not None:
            self._pass_over(len(data), self._rest_bytes)
        if self._head_bytes and not self.transport.is_closing():
            if self._head_bytes > self.pool.limits.head_max_bytes:
                self._reject(self._head_size_error(), Ended.HEAD_SIZE)
            elif self._is_in_head and self._timer is None and self._has_answered():
                self._set_timer(self.pool.limits.head_timeout)  # otherwise it starts when the answer is complete

    def _parse(self, data: bytes) -> None:
        """Parse data. A request to switch protocols is answered without switching (RFC 9110, section 7.8).

        The parser regards a request as complete where another protocol may begin. So the head is parsed again without
        the Upgrade header, and then the rest.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as asked:
                data = data[asked.args[0] :]
                if self._is_refused:
                    return
                self._parser = self._new_parser()  # after "close" the previous one reads nothing more
                self._parser.feed_data(self._plain_head)

    def _begin(self, version: str, *, expects_continue: bool) -> None:
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
        exchange = Exchange(self, scope, keep_alive=keep_alive, expects_continue=expects_continue)
        self._receiving = exchange
        if self._has_answered():
            self._start(exchange)
        else:
            self.pause_reading()
            self._queue.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._answering = exchange
        exchange.task = self._loop.create_task(exchange.run(self._application))
        self.pool.tasks.add(exchange.task)

    def _has_answered(self) -> bool:
        return not self._queue and (self._answering is None or self._answering.is_complete)

    def _wait_for_head(self) -> None:
        if self.transport.is_closing():
            return
        self.pool.idle[self] = self.transport.abort
        self._idle_since = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self.pool.limits.idle_timeout, self._check_idle)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle for too long; otherwise schedule the next check."""
        self._idle_timer = None
        if self in self.pool.idle:
            left = self._idle_since + self.pool.limits.idle_timeout - self._loop.time()
            if left <= 0:
                self._close()
            else:
                self._idle_timer = self._loop.call_later(left, self._check_idle)

    def _pass_over(self, count: int, before: int) -> None:
        """Count bytes that arrive after the answer: the rest of the body, or anything before the client closes."""
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
            seconds = self.pool.limits.head_timeout
            message = f"the request line and the headers did not arrive within {seconds:g} s"
            self._reject(HttpError(408, "timeout", message), Ended.HEAD_TIME)
        else:
            self._abort(Ended.REST)

    def _reject(self, error: HttpError, reason: Ended | None = None) -> None:
        """Answer the request being received, unless part of an answer was sent, and close the connection."""
        self._is_refused = True
        if reason is not None:
            self.pool.ended[reason] += 1
        if self._is_in_head:
            may_answer = self._has_answered()
        else:
            may_answer = not self._queue and self._receiving is not None and not self._receiving.is_started
        if may_answer:
            response = self._send_problem(error)
            if self._is_in_head or self._receiving is None:
                path = self._url.partition(b"?")[0].decode("latin-1")
                self._log_response({**self._scope, "method": "", "path": path}, response, 0.0)
            else:
                self._receiving.rejection = response  # the application logs it
                self._receiving.disconnect()
            self._linger()
        else:
            self._end()

    def _head_size_error(self) -> HttpError:
        most = self.pool.limits.head_max_bytes
        return HttpError(431, "head-size", f"the request line and headers, or the trailers, exceed {most} bytes")

    def _send_problem(self, error: Exception) -> Response:
        response = problem(error)
        lines = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        head = STATUS_LINES[response.status_code] + common_headers(int(time.time())) + lines
        self.write(head + b"cache-control: no-store\r\nconnection: close\r\n\r\n" + bytes(response.body))
        return response

    def _end(self) -> None:
        """Close the connection; cut off an answer in flight, so that nothing is mistaken for its rest."""
        if self._answering is None or self._answering.is_complete or not self._answering.is_started:
            self._close()
        else:
            self.transport.abort()

    def _close(self) -> None:
        """Close the connection once everything is sent, or the client has read nothing for ``send_timeout``."""
        self.transport.close()
        self._set_timer(None)
        if self._send_timer is None and self in self.pool.open:
            self._await_sending()

    def _linger(self) -> None:
        """Send the answer, and keep reading before closing: unread data would reset the connection."""
        # TLS cannot close one direction, so a client that waits for the end of the connection would wait long.
        if not self.transport.can_write_eof() and self._is_refused:
            self._close()
        elif not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._rest_bytes = 0
            self.resume_reading()
            self._set_timer(self.pool.limits.head_timeout)

    def break_off(self) -> None:
        answering = self._answering
        if answering is not None and answering.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self._close()  # the last chunk is missing
        else:
            self.transport.abort()


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
