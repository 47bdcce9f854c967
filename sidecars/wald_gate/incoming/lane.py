"""One connection to the daemon: requests under way in the order of their answers, sent again when it is lost.

Of them there is a bound, so that the daemon, which remembers 1,024 ids of producers, still knows each that it has
carried out when the connection is lost before its answer. What is beyond it waits here.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.client.connection import connect
from wald.errors import Replaced
from wald.format.protocol import Code, ProtocolError, parse_reply
from wald_gate.monitoring.counts import Published
from wald_gate.transport.joined import JoinedWrites

_PASSES = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0
_UNDER_WAY = 256  # requests; there are two connections
_UNSENT_BYTES = 4 << 20  # in the buffer of the connection, from which on new requests wait


@dataclass(slots=True, eq=False)
class Request:
    """A request, until it is answered; ``route`` is empty for a command that is about none."""

    route: str
    line: bytes
    payload: bytes
    answer: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    trouble: OSError | ProtocolError | None = None
    pause: float = _PAUSE_SECONDS

    def give_up(self) -> None:
        """Wait no more; it may still be carried out."""
        if not self.answer.done():
            self.answer.set_exception(TimeoutError())


class Lane:
    """A connection, which is made when there is something to send.

    Args:
        seconds: how long a connection is tried.
        send_again: sends what was lost or refused, over the lane that is the right one by then.
        require: called for each new connection; if it raises, pending requests are answered with that error.
    """

    def __init__(
        self,
        socket: Path,
        published: Published,
        *,
        seconds: float,
        send_again: Callable[[Request], None],
        require: Callable[[], None],
    ) -> None:
        self._require = require
        self._socket = socket
        self._published = published
        self._seconds = seconds
        self._send_again = send_again
        self.under_way: deque[Request] = deque()
        self._waiting: OrderedDict[Request, None] = OrderedDict()  # to be sent once there is a connection, or room
        self._wanted = asyncio.Event()
        self._is_held = False
        self._transport: JoinedWrites | None = None
        self._task = asyncio.create_task(self._keep_sending(), name="wald-gate-daemon")

    async def close(self) -> None:
        """Close the connection; what is under way may be carried out or not."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.break_off()

    def break_off(self) -> None:
        """Give the connection up; what is under way is sent again."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, request: Request) -> None:
        """Send, or keep it until there is a connection, or room."""
        self._waiting[request] = None
        if self._transport is None:
            self._wanted.set()
        else:
            self._send_on()

    def requests(self) -> Iterator[Request]:
        """All of them, sent or not."""
        yield from self.under_way
        yield from self._waiting

    def forget(self, request: Request) -> None:
        """Keep nothing of a request that was given up; what was sent of it may be carried out."""
        self._waiting.pop(request, None)
        request.payload = b""

    def _send_on(self) -> None:
        """Send what waits, as far as there is room."""
        while self._waiting and self._transport is not None and not self._is_held and len(self.under_way) < _UNDER_WAY:
            request, _ = self._waiting.popitem(last=False)
            self.under_way.append(request)
            self._transport.write(request.line)
            self._transport.write(request.payload)

    def take(self, line: bytes) -> None:
        """Take an answer, which is that to the oldest request under way."""
        if not self.under_way:  # the daemon says why it closes the connection
            return
        request = self.under_way.popleft()
        self._send_on()
        if request.answer.done():  # it was given up
            return
        try:
            request.answer.set_result(parse_reply(line))
        except ProtocolError as error:
            if error.code in _PASSES:
                request.trouble = error
                self._published.repeated += 1
                asyncio.get_running_loop().call_later(request.pause, self._repeat, request)
                request.pause = min(2 * request.pause, _PAUSE_MAX_SECONDS)
            else:
                request.answer.set_exception(error)

    def _repeat(self, request: Request) -> None:
        if not request.answer.done():
            self._send_again(request)

    def lose(self) -> None:
        """Take in that the connection is lost: what was under way is sent again."""
        self._transport, self._is_held = None, False
        lost = [request for request in self.under_way if not request.answer.done()]
        self._published.repeated += len(lost)
        self._waiting = OrderedDict.fromkeys([*lost, *self._waiting])
        self.under_way.clear()
        self._wanted.set()

    def hold(self, *, held: bool) -> None:
        """Take in whether the daemon reads more slowly than is written to it."""
        self._is_held = held
        self._send_on()

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
            except Replaced as error:
                refused, self._waiting = self._waiting, OrderedDict()
                for request in refused:
                    if not request.answer.done():
                        request.answer.set_exception(type(error)(error.message, hint=error.hint))
                continue
            except OSError as error:
                for request in self._waiting:
                    request.trouble = error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MAX_SECONDS)
                self._wanted.set()
                continue
            waiting, self._waiting = self._waiting, OrderedDict()
            for request in waiting:
                self._send_again(request)

    async def _connected(self) -> JoinedWrites:
        connection = await asyncio.to_thread(self._connect)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Answers(self), sock=connection)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        return JoinedWrites(transport)

    def _connect(self) -> socket.socket:
        """Connect to the daemon, and check that it still serves the log that this gate was started for."""
        connection = connect(self._socket, seconds=self._seconds)
        try:
            self._require()
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection


class _Answers(asyncio.Protocol):
    """Cuts what the daemon sends into lines."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._lane.take(line)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lane.lose()

    def pause_writing(self) -> None:
        self._lane.hold(held=True)

    def resume_writing(self) -> None:
        self._lane.hold(held=False)
