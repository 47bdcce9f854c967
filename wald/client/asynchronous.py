"""Connection to the daemon for asyncio, over the sans-IO state of its requests, and the producer that uses it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from wald.client.payloads import Time, Value, encode_values
from wald.client.producer import Durable, find_socket, payloads_of
from wald.client.session import (
    PAUSE_MAX_SECONDS,
    PAUSE_SECONDS,
    SOCKET_NAME,
    TRY_AGAIN,
    WINDOW,
    Pipeline,
    Request,
    check_size,
    connect,
    error_after_retries,
    permanent_error,
    random_id,
)
from wald.errors import Refused, Replaced, WaldError
from wald.format.names import check_route
from wald.format.protocol import ProtocolError, Publish, encode_publish

_OUTSIDE = "use a Producer for asyncio in an async with block"

_UNSENT_BYTES = 4 << 20  # buffered by a connection; above this, requests wait
_JOINED_BYTES = 64 << 10  # sent at once, without waiting for the end of the loop iteration


@dataclass(slots=True, eq=False)
class DaemonRequest(Request):
    """Request of a task that awaits the answer."""

    answer: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failure: OSError | ProtocolError | None = None
    pause: float = PAUSE_SECONDS

    @property
    def is_done(self) -> bool:
        return self.answer.done()

    def give_up(self) -> None:
        """End the task's wait; the daemon may still store the records."""
        if not self.answer.done():
            self.answer.set_exception(TimeoutError())


class DaemonConnection(asyncio.Protocol):
    """Connection that opens when there is something to send, and reopens when it is lost.

    A temporarily refused request is resent after a pause. With ``in_order``, so are the requests after it, and nothing
    is sent after a permanent error.

    Args:
        seconds: how long one attempt to connect may take.
        resend: resends a lost or refused request; by default over this connection.
        require: called for each new connection; if it raises, the waiting requests fail with that error.
        on_repeat: called with the number of requests that are resent.
    """

    def __init__(
        self,
        path: Path,
        *,
        window: int,
        in_order: bool = False,
        seconds: float | None = None,
        resend: Callable[[DaemonRequest], None] | None = None,
        require: Callable[[], None] = lambda: None,
        on_repeat: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._in_order = in_order
        self._seconds = seconds
        self._resend = resend or self.send
        self._require = require
        self._on_repeat = on_repeat
        self._pause = PAUSE_SECONDS
        self._is_refused = False
        self._has_ended = False
        self._wanted = asyncio.Event()
        self._is_full = False
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0
        self.requests: Pipeline[DaemonRequest] = Pipeline(window)
        self._task = asyncio.create_task(self._keep_connected(), name="wald-daemon-connection")

    async def close(self) -> None:
        """Close the connection; requests in flight may or may not be stored."""
        self._task.cancel()
        try:
            await asyncio.wait([self._task])  # unlike awaiting the task, this tells its cancellation from the caller's
        finally:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Cancel all requests, and send nothing more."""
        self._has_ended = True
        for request in self.requests:
            request.answer.cancel()
        self.requests.waiting.clear()
        self.abort()

    def send(self, request: DaemonRequest) -> None:
        """Send a request, or queue it until a connection has room for it."""
        self.requests.waiting[request] = None
        if self._transport is None:
            self._wanted.set()
        else:
            self._send_waiting()

    def forget(self, request: DaemonRequest) -> None:
        self.requests.waiting.pop(request, None)
        request.payload = b""

    def data_received(self, data: bytes) -> None:
        for request, reply in self.requests.receive(data):
            if isinstance(reply, str):
                self._pause = PAUSE_SECONDS
                if not request.answer.done():
                    request.reply = reply
                    request.answer.set_result(reply)
            elif reply.code not in TRY_AGAIN:
                if not request.answer.done():
                    request.answer.set_exception(reply)
                if self._in_order:
                    self._has_ended = True  # before the callback of the answer runs
                    self.abort()
                    return
            elif self._in_order:
                request.failure = reply
                self._is_refused = True
                self.abort()
                return  # the replies after it are errors too
            elif not request.answer.done():
                request.failure = reply
                self._on_repeat(1)
                asyncio.get_running_loop().call_later(request.pause, self._repeat, request)
                request.pause = min(2 * request.pause, PAUSE_MAX_SECONDS)
        self._send_waiting()

    def connection_lost(self, _error: Exception | None) -> None:
        """Prepare to resend the requests in flight."""
        self._transport, self._is_full = None, False
        self._unsent, self._unsent_bytes = [], 0
        self._on_repeat(self.requests.lose())
        if self.requests.waiting:
            self._wanted.set()

    def pause_writing(self) -> None:
        """Stop sending, because the daemon reads more slowly."""
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._has_ended:
            return
        while self._transport is not None and not self._is_full and (request := self.requests.next_request()):
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent += (request.line, request.payload)
            self._unsent_bytes += len(request.payload)
            if self._unsent_bytes > _JOINED_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Send the requests of one event loop iteration with one system call."""
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(unsent)

    def _repeat(self, request: DaemonRequest) -> None:
        if not request.answer.done():
            self._resend(request)

    async def _keep_connected(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                if self._is_refused:
                    self._is_refused = False
                    await self._wait()
                if self._transport is None:
                    await self.connect()
            except Replaced as error:
                refused, self.requests.waiting = self.requests.waiting, OrderedDict()
                for request in refused:
                    if not request.answer.done():
                        request.answer.set_exception(type(error)(error.message, hint=error.hint))
            except OSError as error:
                for request in self.requests.waiting:
                    request.failure = error
                await self._wait()
                self._wanted.set()
            else:
                if not self._in_order:
                    self._pause = PAUSE_SECONDS
                waiting, self.requests.waiting = self.requests.waiting, OrderedDict()
                for request in waiting:
                    self._repeat(request)

    async def _wait(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_MAX_SECONDS)
        await asyncio.sleep(pause)

    async def connect(self) -> None:
        connecting = asyncio.get_running_loop().run_in_executor(None, self._connected_socket)
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close_socket)
            raise
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._transport = transport

    def _connected_socket(self) -> socket.socket:
        connection = connect(self._path, seconds=self._seconds)
        try:
            self._require()
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection


def _close_socket(connecting: asyncio.Future[socket.socket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class AsyncReceipt:
    """Sequences of the records of one :meth:`Producer.send`; awaiting it waits until they are durable.

    Example::

        async with aio.Producer("/var/spool/wald") as producer:
            receipt = await producer.send("orders", ["4 apples", "1 pear"])
            print("durable:", await receipt)
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.requests: list[DaemonRequest] = []

    def done(self) -> bool:
        """Return True if all records are durable or have failed."""
        return all(request.answer.done() for request in self.requests)

    def __await__(self) -> Generator[Any, None, list[int]]:
        """Wait, and return the sequence of each record.

        Raises:
            WaldError: see :meth:`wald.Producer.publish`.
        """
        durable = yield from self._producer.receive(self.requests).__await__()
        return [sequence for first, last in durable for sequence in range(first, last + 1)]


class Producer:
    """:class:`wald.Producer` for asyncio. It connects when its ``async with`` block begins.

    Tasks may share a producer: records are sent in the order of the calls. A call still takes effect if its task is
    cancelled. No thread waits for the daemon.

    Example::

        async with aio.Producer("/var/spool/wald") as producer:
            await producer.send("orders", ["4 apples", "1 pear"])
            print(await producer.flush())
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        *,
        producer_id: int | None = None,
        retry_for: float = 30.0,
        connect_for: float | None = None,
    ) -> None:
        self._path = Path(at)
        self._id = producer_id or random_id()
        self._retry_for = retry_for
        self._connect_for = retry_for if connect_for is None else connect_for
        self._number = 0
        self._connection: DaemonConnection | None = None
        self._in_flight: deque[DaemonRequest] = deque()
        self._durable: dict[DaemonRequest, Durable] = {}
        self._room = asyncio.Semaphore(WINDOW)
        self._sending = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._error: WaldError | None = None  # to raise in the next call
        self._end_reason = ""

    async def __aenter__(self) -> Self:
        self._path = find_socket(self._path)
        loop = asyncio.get_running_loop()
        connection = DaemonConnection(self._path, window=1, in_order=True, seconds=self._retry_for)
        deadline, pause = loop.time() + self._connect_for, 0.02
        try:
            while True:
                try:
                    await connection.connect()
                    break
                except OSError as error:
                    if loop.time() >= deadline or isinstance(error, PermissionError):
                        raise await self._explain(error) from None
                await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
                pause = min(2 * pause, 1.0)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and (self._error is not None or not self._end_reason):
                await self._wait_for_all()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection; unacknowledged records may or may not be in the log."""
        self._end(f"{self._path}: close() was called")
        if self._giving_up is not None and not self._giving_up.done():
            self._giving_up.cancel()
        if self._connection is not None:
            await self._connection.close()

    @property
    def unanswered(self) -> int:
        """See :attr:`wald.Producer.unanswered`."""
        return sum(request.records for request in self._in_flight)

    async def send(
        self,
        route: str,
        values: Sequence[Value],
        *,
        keys: Sequence[Value | None] | None = None,
        times: Sequence[Time | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        not_before: Sequence[Time | None] | None = None,
    ) -> AsyncReceipt:
        """See :meth:`wald.Producer.send`; waits only if many requests are in flight.

        Returns:
            a receipt; ``await`` it for the sequences.
        """
        check_route(route)
        payloads = encode_values(values, keys=keys, times=times, headers=headers, not_before=not_before)
        return await self._publish_all(route, payloads, columns=True)

    async def publish(self, route: str, payload: bytes, *, columns: bool = False) -> AsyncReceipt:
        """See :meth:`wald.Producer.publish`."""
        return await self._publish_all(route, payloads_of(route, payload, columns=columns), columns=columns)

    async def flush(self) -> list[Durable]:
        """See :meth:`wald.Producer.flush`."""
        await self._wait_for_all()
        return await self.acknowledged()

    async def acknowledged(self) -> list[Durable]:
        """See :meth:`wald.Producer.acknowledged`."""
        durable, self._durable = self._durable, {}
        return list(durable.values())

    async def receive(self, requests: Sequence[DaemonRequest]) -> list[Durable]:
        """Wait for the requests of a receipt."""
        await _settled(requests)
        durable = []
        for request in requests:
            if request.answer.cancelled() or request.answer.exception() is not None:
                self._require_open()
            durable.append(request.durable)
            self._durable.pop(request, None)
        return durable

    async def _publish_all(self, route: str, payloads: Iterable[bytes | memoryview], *, columns: bool) -> AsyncReceipt:
        if self._connection is None:
            raise RuntimeError(_OUTSIDE)
        return await asyncio.shield(asyncio.create_task(self._send_all(self._connection, route, payloads, columns)))

    async def _send_all(
        self, connection: DaemonConnection, route: str, payloads: Iterable[bytes | memoryview], columns: bool
    ) -> AsyncReceipt:
        receipt = AsyncReceipt(self)
        async with self._sending:
            for payload in payloads:
                check_size(route, payload)
                self._require_open()
                await self._room.acquire()
                if self._end_reason:
                    self._room.release()
                    self._require_open()
                self._number += 1
                publish = Publish(route.encode(), len(payload), columns, self._id, self._number)
                request = DaemonRequest(route, encode_publish(publish), payload)
                request.answer.add_done_callback(partial(self._answered, connection, request))
                receipt.requests.append(request)
                self._in_flight.append(request)
                if self._timer is None:
                    self._start_timer()
                connection.send(request)
        return receipt

    def _answered(self, connection: DaemonConnection, request: DaemonRequest, answer: asyncio.Future[str]) -> None:
        self._room.release()
        if self._end_reason:
            if not answer.cancelled():
                answer.exception()  # it is reported already
            return
        error = answer.exception()
        if isinstance(error, ProtocolError):
            self._in_flight.clear()
            root = self._path.parent if self._path.name == SOCKET_NAME else None
            self._fail(permanent_error(error, request.line, root=root, socket=self._path))
            return
        self._in_flight.popleft()
        request.payload = b""  # receipts keep the request
        self._durable[request] = request.durable
        connection.requests.window = WINDOW  # a new producer may start at any number, so its first one goes alone
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._in_flight and not self._end_reason:
            self._timer = asyncio.get_running_loop().call_later(self._retry_for, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        self._giving_up = asyncio.create_task(self._fail_in_flight(self._in_flight[0]), name="wald-aio-give-up")

    async def _fail_in_flight(self, oldest: DaemonRequest) -> None:
        error = await self._explain(oldest.failure or TimeoutError())
        if self._in_flight and self._in_flight[0] is oldest and not self._end_reason:
            self._fail(error)
        elif self._timer is None:
            self._start_timer()

    async def _explain(self, reason: OSError | ProtocolError) -> WaldError:
        root = self._path.parent if self._path.name == SOCKET_NAME else None
        return await asyncio.to_thread(error_after_retries, reason, root=root, socket=self._path)

    def _fail(self, error: WaldError) -> None:
        self._error = error
        self._end(error.message)

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.end()

    def _require_open(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._end_reason:
            raise Refused(f"the producer has ended: {self._end_reason}", case="producer-has-ended")
        if self._connection is None:
            raise RuntimeError(_OUTSIDE)

    async def _wait_for_all(self) -> None:
        async with self._sending:  # after the calls that began earlier
            requests = list(self._in_flight)
        await _settled(requests)
        if self._error is not None or self._in_flight or self._connection is None:
            self._require_open()


async def _settled(requests: Sequence[DaemonRequest]) -> None:
    pending = [request.answer for request in requests if not request.answer.done()]
    if pending:
        await asyncio.wait(pending)
    await asyncio.sleep(0)  # for the callbacks of those that were done
