"""A connection of a client: uvicorn's, with the bounds that uvicorn leaves to what stands in front of it.

A request line with its headers has to come within some seconds and in so many bytes, and a response has to be taken.
What is left of a body once its request is answered is read for as long, so that the client sees the answer.
Of requests that come before the answers to others a number is kept; who sends more gets these answers, and no others.
The user at the other end of a unix socket is known. When there are too many connections, one of those that wait for
their next request makes way, the one that has waited for longest.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from wald_gate.limits import COMPLETE
from wald_gate.rights.clients import CERTIFICATE, PEER
from wald_gate.settings import LimitSettings
from wald_gate.transport.joined import JoinedWrites

BREAK_OFF = "wald.break-off"  # in the scope: what ends the connection in the middle of an answer
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
_HEADER_BYTES = 4  # around a name and a value
_UNSENT_BYTES = 256 << 10  # of a response, in the buffer of its connection
_HEAD_SIZE = b"431 Request Header Fields Too Large"
_PIPELINED = 64  # requests behind the one that is being answered
_ANY_LENGTH = 1 << 62
_REST_BYTES = 64 << 20  # of a body, that are read after the answer


class Ended(StrEnum):
    """Why the gate has ended a connection."""

    MADE_WAY = "made way"
    """It was idle, and another one needed its place."""
    NO_PLACE = "no place"
    HEAD_SIZE = "head too large"
    HOST = "no host, or several"
    HEAD_TIME = "head too slow"
    SEND_TIME = "answer not taken"
    REST = "body after its answer"
    PIPELINED = "too many requests at once"
    CERTIFICATE = "certificate refused"


class Waits(Protocol):
    """What waits for its client."""

    def make_way(self) -> None:
        """End."""


@dataclass
class Bounds:
    """What connections may take; shared by all of them.

    Attributes:
        limits: as they are now; beyond ``connections_max`` idle ones make way, and without an idle one new ones are
            closed.
        open: without those of which the TLS handshake is not done.
        idle: what waits for a request, or for a handshake to be done, in the order in which that began.
        count: of all, handshakes included.
        open_from: how many of them are of which address, or of which user on the unix socket.
        ended: how many connections were ended for which reason.
        is_proxy: whether an address is that of a proxy, whose connections are those of many clients.
    """

    limits: LimitSettings
    open: set[Connection] = field(default_factory=set)
    idle: OrderedDict[Waits, None] = field(default_factory=OrderedDict)
    count: int = 0
    open_from: Counter[str] = field(default_factory=Counter)
    ended: Counter[Ended] = field(default_factory=Counter)
    is_proxy: Callable[[str], bool] = lambda _: False

    def enter(self, client: str) -> bool:
        """Count a connection that has come; :meth:`leave` has to follow, also if there is no place for it: False."""
        self.count += 1
        self.open_from[client] += 1
        limits = self.limits
        bound = limits.connections_per_address or limits.connections_max
        if self.open_from[client] > bound and not self.is_proxy(client):
            self.ended[Ended.NO_PLACE] += 1
            return False
        if self.count > limits.connections_max:
            if not self.idle:
                self.ended[Ended.NO_PLACE] += 1
                return False
            self.ended[Ended.MADE_WAY] += 1
            longest, _ = self.idle.popitem(last=False)
            longest.make_way()
        return True

    def leave(self, client: str) -> None:
        """Take in that a connection is no longer there."""
        self.count -= 1
        self.open_from[client] -= 1
        if not self.open_from[client]:
            del self.open_from[client]


class Connection(HttpToolsProtocol):
    """One connection. ``bounds`` is set in a class of its own for each server.

    Attributes:
        client_place: as whose it was counted, if it was before it was made; then it is for another to see that there is
            a place for it.
        is_made: whether it has begun, and sees to its place itself.
    """

    bounds: Bounds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_in_head = True
        self._is_between = True  # nothing of a request has come
        self._plain_head = b""  # of a request that asks for another protocol, without that
        self._is_refused = False  # and nothing that it sends is looked at any more
        self._rest_bytes: int | None = None  # of a body, that have come after its answer
        self._timer: asyncio.TimerHandle | None = None  # for what comes
        self._send_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._peer: int | None = None
        self._certificate: str | None = None
        self.client_place = ""
        self.is_made = False
        self.timeout_keep_alive = self.bounds.limits.idle_timeout  # type: ignore[assignment]  # it takes fractions

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]  # it has all of it
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._peer, self._certificate = _peer_of(transport), _certificate_of(transport)
        self.bounds.open.add(self)
        self.is_made = True
        if not self.client_place:
            self.client_place = f"user {self._peer}" if self._peer is not None else str((self.client or ("",))[0])
            if not self.bounds.enter(self.client_place):
                transport.abort()
                return
        self._wait_for_head()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._set_send_timer(None)
        self.bounds.open.discard(self)
        self.bounds.leave(self.client_place)
        self.bounds.idle.pop(self, None)
        super().connection_lost(exc)
        if self._answering is not None and self._answering is not self.cycle:  # uvicorn tells the last one alone
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or (self._is_between and not data.strip(b"\r\n")):  # RFC 9112, section 2.2
            return
        self.bounds.idle.pop(self, None)
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter: CONNECT
            self.send_400_response("Invalid HTTP request received.")
        if self._rest_bytes is not None:
            self._pass_over(len(data), self._rest_bytes)
        if self._head_bytes and not self.transport.is_closing():
            if self._head_bytes > self.bounds.limits.head_max_bytes:
                self._refuse(Ended.HEAD_SIZE, _HEAD_SIZE)
            elif self._is_in_head and self._timer is None and self._has_answered():
                self._set_timer(self.bounds.limits.head_timeout)  # else it has time until the answer is complete

    def _parse(self, data: bytes) -> None:
        """Parse; who asks for another protocol is answered as if he had not (RFC 9110, section 7.8).

        The parser takes a request as ended where another protocol may begin. So its head is parsed again without that
        question, and then what came behind it.

        Raises:
            HttpParserError, HttpParserUpgrade: it is no request that can be answered.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as asked:
                rest = rest[asked.args[0] :]
                if self._is_refused:
                    return
                self.parser = httptools.HttpRequestParser(self)  # behind "close" the one before reads nothing more
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(self._plain_head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False
        self.scope[BREAK_OFF] = self._break_off  # type: ignore[literal-required]
        if self._peer is not None:
            self.scope[PEER] = self._peer  # type: ignore[literal-required]
        if self._certificate is not None:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # a trailer is of no use, and is counted as it comes
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._set_timer(None)
        self._rest_bytes = None
        if self._is_refused:
            return
        if self.parser.should_upgrade():
            line = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
            headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self._plain_head = b"%b %b HTTP/%b\r\n%b\r\n" % (*line, headers)
            return
        size = len(self.url) + sum(len(name) + len(value) + _HEADER_BYTES for name, value in self.headers)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if size > self.bounds.limits.head_max_bytes:  # it came with its end, in one read
            self._refuse(Ended.HEAD_SIZE, _HEAD_SIZE)
        elif hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):  # RFC 9112, section 3.2
            self._refuse(Ended.HOST, b"400 Bad Request")
        elif len(self.pipeline) == _PIPELINED:
            self._is_refused = True
            self.bounds.ended[Ended.PIPELINED] += 1
            self.cycle.keep_alive = False  # its answer, the last one, says that the connection ends
        else:
            super().on_headers_complete()
            self._is_in_head, self._head_bytes = False, 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.send = partial(_send_without_chunks, cycle, cycle.send)  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._is_refused or self.parser.should_upgrade()):
            super().on_message_complete()
            self.scope[COMPLETE] = True  # type: ignore[literal-required]
            self._is_in_head, self._is_between, self._head_bytes = True, True, 0

    def on_response_complete(self) -> None:
        if len(self.bounds.open) - len(self.bounds.idle) == 1:
            # Beside others, also those that only follow, it goes with theirs: their clients ask again together, and
            # share a sync.
            self.transport.flush()  # type: ignore[attr-defined]  # of JoinedWrites
        super().on_response_complete()
        if not self._has_answered() or self.transport.is_closing():
            return
        if self._is_in_head and not self._head_bytes:
            self._wait_for_head()
        else:
            self._rest_bytes = None if self._is_in_head else 0
            self._set_timer(self.bounds.limits.head_timeout)

    def send_400_response(self, msg: str) -> None:
        if self._expects_answer():
            super().send_400_response(msg)
        else:
            self._end()

    def distrust(self) -> None:
        """Take it that the client has shown no certificate, and end if it has: the next one may show another."""
        if self._certificate is None:
            return
        self._certificate = None
        for cycle in (self._answering, self.cycle, *(each for each, _ in self.pipeline)):
            if cycle is not None:
                cycle.scope.pop(CERTIFICATE, None)  # type: ignore[misc]
        self.shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_send_timer(self.bounds.limits.send_timeout)

    def resume_writing(self) -> None:
        self._set_send_timer(None)
        super().resume_writing()

    def make_way(self) -> None:
        self.transport.abort()

    def _wait_for_head(self) -> None:
        if not self.transport.is_closing():
            self.bounds.idle[self] = None
            self.bounds.idle.move_to_end(self)

    def _pass_over(self, count: int, before: int) -> None:
        """Take in that bytes of a body have come after its answer."""
        self._rest_bytes = before + count
        if self._is_in_head:  # this was the end of it
            self._rest_bytes = None
            self._set_timer(None)
            self._wait_for_head()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif self._rest_bytes > _REST_BYTES:
            self._abort(Ended.REST)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._time_out)

    def _set_send_timer(self, seconds: float | None) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = None if seconds is None else self.loop.call_later(seconds, self._abort, Ended.SEND_TIME)

    def _time_out(self) -> None:
        self._timer = None
        if self._is_in_head:
            self._refuse(Ended.HEAD_TIME, b"408 Request Timeout")
        else:
            self._abort(Ended.REST)

    def _abort(self, reason: Ended) -> None:
        self.bounds.ended[reason] += 1
        self.transport.abort()

    def _refuse(self, reason: Ended, status: bytes) -> None:
        self._is_refused = True
        self.bounds.ended[reason] += 1
        if self._expects_answer():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self._end()

    def _break_off(self) -> None:
        """Close, behind what there is of an answer; without its last chunk it does not pass for complete."""
        if self.transport.is_closing():  # the client has left, and uvicorn has dropped the parser
            self.transport.abort()
        elif self.parser.get_http_version() == "1.1":
            self.transport.close()
        else:  # its end is that of the connection
            self.transport.abort()

    def _expects_answer(self) -> bool:
        """Whether what is being received is the one request that has had nothing of its answer yet."""
        if self._is_in_head:
            return self._has_answered()
        return not (self.pipeline or self.cycle.response_started)

    def _end(self) -> None:
        """Close; an answer that is under way breaks off, so that nothing passes for the rest of it."""
        if self._has_answered() or not self.cycle.response_started:
            self.transport.close()
        else:
            self.transport.abort()

    def _has_answered(self) -> bool:
        return getattr(self.cycle, "response_complete", True)


async def _send_without_chunks(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Answer a client without chunked encoding: closing the connection ends the answer (RFC 9112, section 6.3)."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding, cycle.expected_content_length = False, _ANY_LENGTH
    elif not message.get("more_body") and cycle.expected_content_length > _ANY_LENGTH // 2:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _peer_of(transport: asyncio.Transport) -> int | None:
    """The user at the other end of a unix socket."""
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
