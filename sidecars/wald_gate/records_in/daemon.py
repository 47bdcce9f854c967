"""Client of the daemon: requests of many producer ids in flight over one connection, with retries.

A request that stores records has a producer id and a number, so the daemon recognises it when it is sent again. An id
has one request in flight, and a connection a limited number of requests, because the daemon remembers 1,024 ids; other
requests wait. Routes for which the daemon makes requests wait use a second connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.client.connection import connect, status
from wald.client.session import Durable, error_after_retries, permanent_error
from wald.errors import Refused, Replaced, Unavailable, WaldError
from wald.format.protocol import Code, ProtocolError, Publish, encode_publish, parse_reply
from wald_gate.info.monitoring import Published
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.transport.joined import JoinedWrites

_OVERTAKEN = frozenset({Code.GAP, Code.FORGOTTEN, Code.CONFLICT})
_TRY_AGAIN = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})
_STATUS_SECONDS = 1.0
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0
_IN_FLIGHT = 256  # requests of a connection; there are two
_UNSENT_BYTES = 4 << 20  # buffered by a connection; with more, requests wait


class Overtaken(Refused):
    """The number of a request is not the next one of its producer; ``code`` says why."""

    def __init__(self, message: str, *, hint: str = "", code: Code | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


@dataclass(slots=True)
class Producer:
    """Producer id, and the number of its last request."""

    id: int = field(default_factory=lambda: int.from_bytes(os.urandom(8)) >> 1 or 1)
    number: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """Request until it is answered; ``route`` is empty for a command."""

    route: str
    line: bytes
    payload: bytes
    answer: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failure: OSError | ProtocolError | None = None
    pause: float = _PAUSE_SECONDS

    def give_up(self) -> None:
        """End the wait; the daemon may still store the records."""
        if not self.answer.done():
            self.answer.set_exception(TimeoutError())


class DaemonClient:
    """Client of the daemon of a log.

    Args:
        root: the log's root.
        patience: seconds for which a request is tried before it is Unavailable; it may still be stored later.
        require: raises an error if the daemon serves another log, or an older copy of this one.
    """

    def __init__(
        self, root: Path, socket: Path, *, patience: float, require: Callable[[], None] = lambda: None
    ) -> None:
        self._root = root
        self._socket = socket
        self.patience = patience
        self.published = Published()
        self._idle: list[Producer] = []
        self._main, self._held = (
            DaemonConnection(socket, self.published, seconds=patience, resend=self._send, require=require)
            for _ in range(2)
        )
        self._held_routes: frozenset[str] = frozenset()  # all their requests use the second connection
        self._explaining: dict[str, asyncio.Future[WaldError]] = {}  # why the daemon does not answer
        self._task = asyncio.create_task(self._watch_status(), name="wald-gate-held-routes")

    async def publish(self, route: str, payload: bytes, *, columns: bool) -> Durable:
        """Store records durably.

        Raises:
            WaldError: nothing is stored; after Unavailable and DiskFailure it may be, later.
        """
        end = self.deadline()
        producer = self._idle.pop() if self._idle else Producer()
        for _ in range(2):
            producer.number += 1
            try:
                durable = await self._publish(_encode(route, payload, producer, columns=columns), end)
            except Overtaken as overtaken:
                if overtaken.code is not Code.GAP or producer.number == 1:
                    raise
                self._idle.clear()  # an older copy of the log was restored; it lacks their last batches
                producer = Producer()
            else:
                break
        self._idle.append(producer)  # not after an error: its last number may or may not be stored
        return durable

    async def publish_as(self, producer: Producer, route: str, payload: bytes, *, seen: int, until: float) -> Durable:
        """Store columns under the caller's producer id and number, by the loop's time ``until``.

        Args:
            seen: the sequence up to which the caller knows all batches of the id.

        Raises:
            Overtaken: the number is taken or not the next one, or the daemon has forgotten the id and may have stored
                something under it after ``seen``.
            WaldError: see :meth:`publish`.
        """
        return await self._publish(_encode(route, payload, producer, columns=True, seen=seen), until)

    async def command(self, *words: str) -> str:
        """Send a request other than PUB; return the text after ``OK``."""
        return await self._ask(Request("", " ".join(words).encode() + b"\n", b""), self.deadline())

    async def close(self) -> None:
        """Close the connections; requests in flight may or may not be stored."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._main.close()
        await self._held.close()

    def deadline(self) -> float:
        """Return the loop's time at which a request that starts now is given up."""
        return asyncio.get_running_loop().time() + self.patience

    async def _publish(self, request: Request, end: float) -> Durable:
        began = time.perf_counter()
        try:
            first, last = (await self._ask(request, end)).split()
        finally:
            self.published.seconds.observe(time.perf_counter() - began)
        return Durable(int(first), int(last))

    async def _ask(self, request: Request, end: float) -> str:
        timer = asyncio.get_running_loop().call_at(end, request.give_up)  # a third of the cost of asyncio.timeout
        try:
            self._send(request)
            return await request.answer
        except TimeoutError:
            self._forget(request)
            raise await self._explain(request.failure or TimeoutError()) from None
        except asyncio.CancelledError:
            self._forget(request)
            raise
        except ProtocolError as error:
            if error.code in _OVERTAKEN:
                hint = "GET the records, to see what is stored, before it is sent again"
                raise Overtaken(error.message, hint=hint, code=error.code) from None
            if error.code is Code.BAD_REQUEST and request.route:
                message = f"the daemon is older than this gate, and does not know what it asks for: {error.message}"
                raise Unavailable(message, hint="start the daemon again, with the version of the gate") from None
            raise permanent_error(error, request.line, root=self._root, socket=self._socket) from None
        finally:
            timer.cancel()

    def _forget(self, request: Request) -> None:
        for connection in (self._main, self._held):
            connection.forget(request)

    async def _explain(self, reason: OSError | ProtocolError) -> WaldError:
        """Return the error of a request that was given up. Requests with the same reason share it."""
        key = repr(reason)
        if (explaining := self._explaining.get(key)) is None:
            explaining = self._explaining[key] = asyncio.ensure_future(asyncio.to_thread(self._error, reason))
            explaining.add_done_callback(lambda _: self._explaining.pop(key))
        return (await asyncio.shield(explaining)).with_traceback(None)

    def _error(self, reason: OSError | ProtocolError) -> WaldError:
        if isinstance(reason, ProtocolError) and reason.code is Code.BUSY:
            return _busy(reason.message)
        if isinstance(reason, TimeoutError) and isinstance(routes := status(self._socket).get("busy"), list) and routes:
            return _busy(f"a pipe is in the middle of a long line for route {routes[0]}, and requests wait for its end")
        return error_after_retries(reason, root=self._root, socket=self._socket)

    def _send(self, request: Request) -> None:
        self._connection_of(request).send(request)

    def _connection_of(self, request: Request) -> DaemonConnection:
        return self._held if request.route in self._held_routes else self._main

    async def _watch_status(self) -> None:
        """Find the routes for which requests wait: all requests behind them on a connection wait too."""
        oldest: Request | None = None
        while True:
            before, oldest = oldest, self._main.in_flight[0] if self._main.in_flight else None
            is_stuck = oldest is not None and oldest is before
            if (self._held_routes or is_stuck) and (state := await asyncio.to_thread(status, self._socket)):
                self._move_routes(frozenset(_held_routes(state)))
            await asyncio.sleep(_STATUS_SECONDS)

    def _move_routes(self, routes: frozenset[str]) -> None:
        self._held_routes = routes
        for connection in (self._main, self._held):
            if any(self._connection_of(each) is not connection for each in connection.requests() if each.route):
                connection.abort()


def _held_routes(state: Mapping[str, object]) -> Iterator[str]:
    """Yield the routes over their quota, and those inside a long line of a FIFO, from the daemon's STAT."""
    over, busy = state.get("over_quota"), state.get("busy")
    yield from (each["route"] for each in over if isinstance(each, dict)) if isinstance(over, list) else ()
    yield from (each for each in busy if isinstance(each, str)) if isinstance(busy, list) else ()


def _busy(message: str) -> HttpError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return HttpError(429, "busy", message, hint="send it again; STAT of the daemon says what is busy", headers=headers)


def _encode(route: str, payload: bytes, producer: Producer, *, columns: bool, seen: int | None = None) -> Request:
    line = encode_publish(Publish(route.encode(), len(payload), columns, producer.id, producer.number, seen))
    return Request(route, line, payload)


class DaemonConnection:
    """Connection that is made when there is something to send, and made again when it is lost.

    Args:
        seconds: how long one attempt to connect may take.
        resend: sends a request again that was lost or refused, over the right connection.
        require: called for each new connection; if it raises, the waiting requests fail with that error.
    """

    def __init__(
        self,
        socket: Path,
        published: Published,
        *,
        seconds: float,
        resend: Callable[[Request], None],
        require: Callable[[], None],
    ) -> None:
        self._require = require
        self._socket = socket
        self._published = published
        self._seconds = seconds
        self._resend = resend
        self.in_flight: deque[Request] = deque()
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._wanted = asyncio.Event()
        self._is_full = False
        self._transport: JoinedWrites | None = None
        self._task = asyncio.create_task(self._keep_sending(), name="wald-gate-daemon")

    async def close(self) -> None:
        """Close the connection; requests in flight may or may not be stored."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.abort()

    def abort(self) -> None:
        """Abort the connection; requests in flight are sent again."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, request: Request) -> None:
        """Send a request, or keep it until there is a connection with room for it."""
        self._waiting[request] = None
        if self._transport is None:
            self._wanted.set()
        else:
            self._send_waiting()

    def requests(self) -> Iterator[Request]:
        yield from self.in_flight
        yield from self._waiting

    def forget(self, request: Request) -> None:
        """Free a request that was given up."""
        self._waiting.pop(request, None)
        request.payload = b""

    def receive(self, line: bytes) -> None:
        """Process the reply to the oldest request in flight."""
        if not self.in_flight:  # the daemon says why it closes the connection
            return
        request = self.in_flight.popleft()
        self._send_waiting()
        if request.answer.done():  # it was given up
            return
        try:
            request.answer.set_result(parse_reply(line))
        except ProtocolError as error:
            if error.code in _TRY_AGAIN:
                request.failure = error
                self._published.repeated += 1
                asyncio.get_running_loop().call_later(request.pause, self._repeat, request)
                request.pause = min(2 * request.pause, _PAUSE_MAX_SECONDS)
            else:
                request.answer.set_exception(error)

    def lose(self) -> None:
        """Prepare to send again what was in flight over the lost connection."""
        self._transport, self._is_full = None, False
        lost = [request for request in self.in_flight if not request.answer.done()]
        self._published.repeated += len(lost)
        self._waiting = OrderedDict.fromkeys([*lost, *self._waiting])
        self.in_flight.clear()
        self._wanted.set()

    def pause(self) -> None:
        """Stop sending, because the daemon reads more slowly."""
        self._is_full = True

    def resume(self) -> None:
        self._is_full = False
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._transport is not None and not self._is_full and len(self.in_flight) < _IN_FLIGHT:
            request, _ = self._waiting.popitem(last=False)
            self.in_flight.append(request)
            self._transport.write(request.line)
            self._transport.write(request.payload)

    def _repeat(self, request: Request) -> None:
        if not request.answer.done():
            self._resend(request)

    async def _keep_sending(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                if self._transport is None:
                    self._transport = await self._connect()
                pause = _PAUSE_SECONDS
            except Replaced as error:
                refused, self._waiting = self._waiting, OrderedDict()
                for request in refused:
                    if not request.answer.done():
                        request.answer.set_exception(type(error)(error.message, hint=error.hint))
                continue
            except OSError as error:
                for request in self._waiting:
                    request.failure = error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MAX_SECONDS)
                self._wanted.set()
                continue
            waiting, self._waiting = self._waiting, OrderedDict()
            for request in waiting:
                self._resend(request)

    async def _connect(self) -> JoinedWrites:
        connection = await asyncio.to_thread(self._connected_socket)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Replies(self), sock=connection)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        return JoinedWrites(transport)

    def _connected_socket(self) -> socket.socket:
        connection = connect(self._socket, seconds=self._seconds)
        try:
            self._require()
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection


class _Replies(asyncio.Protocol):
    """Splits what the daemon sends into lines."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._connection.receive(line)

    def connection_lost(self, _error: Exception | None) -> None:
        self._connection.lose()

    def pause_writing(self) -> None:
        self._connection.pause()

    def resume_writing(self) -> None:
        self._connection.resume()
