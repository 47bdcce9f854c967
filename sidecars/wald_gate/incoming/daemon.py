"""Requests to the daemon over one connection: many under way, and sent again when the connection is lost.

Each request that stores records has the id of a producer and a number, so that the daemon recognises it when it comes
again. An id has one request under way at a time: then the daemon still remembers it. Ids are used again, as the daemon
remembers a thousand of them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.client.connection import connect, status
from wald.client.refusals import refused, unreachable
from wald.client.session import Durable
from wald.errors import Refused, WaldError
from wald.format.protocol import Code, ProtocolError, Publish, encode_publish, parse_reply
from wald_gate.monitoring.counts import Published
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.transport.joined import JoinedWrites

_PASSES = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})
_OVERTAKEN = frozenset({Code.GAP, Code.FORGOTTEN, Code.CONFLICT})
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0
_UNSENT_BYTES = 4 << 20  # in the buffer of the connection, from which on new requests wait


class Overtaken(Refused):
    """The number of a request is not the next one of its producer."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request, until it is answered."""

    line: bytes
    payload: bytes
    answer: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    trouble: OSError | ProtocolError | None = None
    pause: float = _PAUSE_SECONDS

    def give_up(self) -> None:
        """Wait no more; it may still be carried out."""
        if not self.answer.done():
            self.answer.set_exception(TimeoutError())


@dataclass(slots=True)
class Producer:
    """An id under which records are stored, and the number of its request."""

    id: int = field(default_factory=lambda: int.from_bytes(os.urandom(8)) >> 1 or 1)
    number: int = 0


class Daemon:
    """The daemon of a log.

    Args:
        root: of the log.
        patience: for how many seconds a request is tried before its answer is :class:`wald.errors.Unavailable`. It
            may still be carried out after that.

    Attributes:
        published: for the metrics.
    """

    def __init__(self, root: Path, socket: Path, *, patience: float) -> None:
        self._root = root
        self._socket = socket
        self._patience = patience
        self.published = Published()
        self._idle: list[Producer] = []
        self._under_way: deque[_Request] = deque()
        self._again: deque[_Request] = deque()  # to be sent once more
        self._wanted = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._transport: JoinedWrites | None = None
        self._task = asyncio.create_task(self._keep_sending(), name="wald-gate-daemon")

    async def publish(self, route: str, payload: bytes, *, columns: bool) -> Durable:
        """Store records; they are on disk when this returns.

        Raises:
            WaldError: nothing of it is stored; but of Unavailable and DiskFailure it may be, later.
        """
        producer = self._idle.pop() if self._idle else Producer()
        producer.number += 1
        request = _publishing(route, payload, producer, columns=columns)
        durable = await self._publish(request)
        self._idle.append(producer)  # not where the last number may be in the log or not
        return durable

    async def publish_as(self, producer: Producer, route: str, payload: bytes) -> Durable:
        """Store columns under an id and a number that the caller has chosen.

        Raises:
            Overtaken: something else is stored under this number, or it is not the next one.
            WaldError: as of :meth:`publish`.
        """
        return await self._publish(_publishing(route, payload, producer, columns=True))

    async def command(self, *words: str) -> str:
        """Carry out what is no PUB; the text behind OK.

        Raises:
            WaldError: as of :meth:`publish`.
        """
        return await self._ask(_Request(" ".join(words).encode() + b"\n", b""))

    async def close(self) -> None:
        """Close the connection; what is under way may be carried out or not."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._transport is not None:
            self._transport.abort()

    async def _publish(self, request: _Request) -> Durable:
        began = time.perf_counter()
        try:
            first, last = (await self._ask(request)).split()
        finally:
            self.published.seconds.observe(time.perf_counter() - began)
        return Durable(int(first), int(last))

    async def _ask(self, request: _Request) -> str:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience
        try:
            if not self._may_write.is_set():
                async with asyncio.timeout_at(end):
                    await self._may_write.wait()
            timer = loop.call_at(end, request.give_up)  # a third of what asyncio.timeout takes
            try:
                self._send(request)
                return await request.answer
            finally:
                timer.cancel()
        except TimeoutError:
            raise await asyncio.to_thread(self._unreachable, request.trouble or TimeoutError()) from None
        except ProtocolError as error:
            if error.code in _OVERTAKEN:
                raise Overtaken(error.message) from None
            raise refused(error, request.line, root=self._root, socket=self._socket) from None

    def _unreachable(self, reason: OSError | ProtocolError) -> WaldError:
        """The error for a request that was tried for long enough; what is busy is no fault of the log."""
        if isinstance(reason, ProtocolError) and reason.code is Code.BUSY:
            return _busy(reason.message)
        if isinstance(reason, TimeoutError) and isinstance(routes := status(self._socket).get("busy"), list) and routes:
            return _busy(f"a pipe is inside a long line of {routes[0]}, and requests wait for its end")
        return unreachable(reason, root=self._root, socket=self._socket)

    def _send(self, request: _Request) -> None:
        if self._transport is None or self._again:
            self._again.append(request)
            self._wanted.set()
        else:
            self._under_way.append(request)
            self._transport.write(request.line)
            self._transport.write(request.payload)

    def take(self, line: bytes) -> None:
        """Take an answer, which is that to the oldest request under way."""
        if not self._under_way:  # the daemon says why it closes the connection
            return
        request = self._under_way.popleft()
        if request.answer.done():  # it was given up
            return
        try:
            request.answer.set_result(parse_reply(line))
        except ProtocolError as error:
            if error.code in _PASSES:
                request.trouble = error
                self.published.repeated += 1
                asyncio.get_running_loop().call_later(request.pause, self._repeat, request)
                request.pause = min(2 * request.pause, _PAUSE_MAX_SECONDS)
            else:
                request.answer.set_exception(error)

    def _repeat(self, request: _Request) -> None:
        if not request.answer.done():
            self._send(request)

    def lose(self) -> None:
        """Take in that the connection is lost: what was under way is sent again."""
        self._transport = None
        self._may_write.set()
        self.published.repeated += len(self._under_way)
        self._again.extendleft(reversed(self._under_way))
        self._under_way.clear()
        self._wanted.set()

    def hold(self, *, held: bool) -> None:
        """Take in whether the daemon reads more slowly than is written to it."""
        if held:
            self._may_write.clear()
        else:
            self._may_write.set()

    async def _keep_sending(self) -> None:
        """Connect when there is something to send, and send again what was lost."""
        pause = _PAUSE_SECONDS
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                if self._transport is None:
                    self._transport = await self._connected()
                pause = _PAUSE_SECONDS
            except OSError as error:
                for request in self._again:
                    request.trouble = error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MAX_SECONDS)
                self._wanted.set()
                continue
            requests, self._again = self._again, deque()
            for request in requests:
                if not request.answer.done():
                    self._send(request)

    async def _connected(self) -> JoinedWrites:
        connection = await asyncio.to_thread(connect, self._socket, seconds=self._patience)
        connection.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Answers(self), sock=connection)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        return JoinedWrites(transport)


def _busy(message: str) -> HttpError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return HttpError(429, "busy", message, hint="send it again; STAT of the daemon says what is busy", headers=headers)


def _publishing(route: str, payload: bytes, producer: Producer, *, columns: bool) -> _Request:
    line = encode_publish(Publish(route.encode(), len(payload), columns, producer.id, producer.number))
    return _Request(line, payload)


class _Answers(asyncio.Protocol):
    """Cuts what the daemon sends into lines."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._daemon.take(line)

    def connection_lost(self, _error: Exception | None) -> None:
        self._daemon.lose()

    def pause_writing(self) -> None:
        self._daemon.hold(held=True)

    def resume_writing(self) -> None:
        self._daemon.hold(held=False)
