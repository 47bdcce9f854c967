"""Client of the daemon: requests of many producer ids in flight over one connection, with retries.

A request that stores records has a producer id and a number, so the daemon recognises it when it is sent again. An id
has one request in flight, and a connection a limited number of requests, because the daemon remembers 1,024 ids; other
requests wait. Routes for which the daemon makes requests wait use a second connection.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.client.asynchronous import DaemonConnection, DaemonRequest
from wald.client.session import Durable, error_after_retries, permanent_error, status
from wald.errors import Refused, Unavailable, WaldError
from wald.format.protocol import Code, ProtocolError, Publish, encode_publish
from wald_gate.info.monitoring import Published
from wald_gate.problems import HttpError

_OVERTAKEN = frozenset({Code.GAP, Code.FORGOTTEN, Code.CONFLICT})
_STATUS_SECONDS = 1.0
_IN_FLIGHT = 256  # requests per connection; there are two


class Overtaken(Refused):
    """Error: the number of a request is not the producer's next one; ``code`` is the daemon's reason."""

    def __init__(self, message: str, *, hint: str = "", code: Code | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


@dataclass(slots=True)
class Producer:
    """Producer id, and the number of its last request."""

    id: int = field(default_factory=lambda: int.from_bytes(os.urandom(8)) >> 1 or 1)
    number: int = 0


class DaemonClient:
    """Client of the daemon of a log.

    A request raises Unavailable after ``patience`` seconds, but may still be stored later. ``require`` raises an error
    if the daemon serves another log, or an older copy of this one.
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
            DaemonConnection(
                socket,
                window=_IN_FLIGHT,
                seconds=patience,
                resend=self._send,
                require=require,
                on_repeat=self.published.count_repeated,
            )
            for _ in range(2)
        )
        self._held_routes: frozenset[str] = frozenset()  # all their requests use the second connection
        self._explaining: dict[str, asyncio.Future[WaldError]] = {}  # why the daemon does not answer
        self._ends: dict[DaemonRequest, float] = {}  # the loop's times at which unanswered requests are given up
        self._next_end = math.inf  # when the timer looks at them: one for all, as most are answered
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._watch_status(), name="wald-gate-held-routes")

    async def publish(self, route: str, payload: bytes, *, columns: bool) -> Durable:
        end = self.deadline()
        producer = self._idle.pop() if self._idle else Producer()
        for _ in range(2):
            producer.number += 1
            try:
                answer = await self._ask(_encode(route, payload, producer, columns=columns), end)
            except Overtaken as overtaken:
                if overtaken.code is not Code.GAP or producer.number == 1:
                    raise
                self._idle.clear()  # an older copy of the log was restored; it lacks their last batches
                producer = Producer()
            else:
                break
        self._idle.append(producer)  # not after an error: its last number may or may not be stored
        return _durable(answer)

    async def publish_as(self, producer: Producer, route: str, payload: bytes, *, seen: int, until: float) -> Durable:
        """Store columns under the caller's producer id and number, by the loop's time ``until``.

        The caller knows all batches of the producer id up to the sequence ``seen``.
        """
        return _durable(await self._ask(_encode(route, payload, producer, columns=True, seen=seen), until))

    async def command(self, *words: str) -> str:
        """Send a request other than PUB; return the text after ``OK``."""
        return await self._ask(DaemonRequest("", " ".join(words).encode() + b"\n", b""), self.deadline())

    async def close(self) -> None:
        """Close the connections; requests in flight may or may not be stored."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._main.close()
        await self._held.close()

    def deadline(self) -> float:
        """Return the loop time at which a request that starts now is given up."""
        return self._loop.time() + self.patience

    async def _ask(self, request: DaemonRequest, end: float) -> str:
        began = time.perf_counter()
        self._ends[request] = end
        if end < self._next_end:
            self._set_timer(end)
        try:
            self._send(request)
            return await request.answer
        except (TimeoutError, asyncio.CancelledError) as error:
            for connection in (self._main, self._held):
                connection.forget(request)
            if isinstance(error, TimeoutError):
                raise await self._explain(request.failure or TimeoutError()) from None
            raise
        except ProtocolError as error:
            if error.code in _OVERTAKEN:
                hint = "GET the records to see what is stored before you send the request again"
                raise Overtaken(error.message, hint=hint, code=error.code) from None
            if error.code is Code.BAD_REQUEST and request.route:
                message = f"the daemon is older than this gate, and does not support this request: {error.message}"
                raise Unavailable(message, hint="restart the daemon with the version of the gate") from None
            raise permanent_error(error, request.line, root=self._root, socket=self._socket) from None
        finally:
            del self._ends[request]
            if request.route:
                self.published.seconds.observe(time.perf_counter() - began)

    def _set_timer(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_end = end
        self._timer = None if end == math.inf else self._loop.call_at(end, self._give_up)

    def _give_up(self) -> None:
        now = self._loop.time()
        for request, end in self._ends.items():
            if end <= now:
                request.give_up()
        self._set_timer(min((end for end in self._ends.values() if end > now), default=math.inf))

    async def _explain(self, reason: OSError | ProtocolError) -> WaldError:
        """Return the error of a request that was given up; requests given up for the same reason share it."""
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

    def _send(self, request: DaemonRequest) -> None:
        self._connection_of(request).send(request)

    def _connection_of(self, request: DaemonRequest) -> DaemonConnection:
        return self._held if request.route in self._held_routes else self._main

    async def _watch_status(self) -> None:
        """Find the routes whose requests wait, because later requests on the same connection wait too."""
        oldest: DaemonRequest | None = None
        while True:
            in_flight = self._main.requests.in_flight
            before, oldest = oldest, in_flight[0] if in_flight else None
            is_stuck = oldest is not None and oldest is before
            if (self._held_routes or is_stuck) and (state := await asyncio.to_thread(status, self._socket)):
                self._move_routes(frozenset(_held_routes(state)))
            await asyncio.sleep(_STATUS_SECONDS)

    def _move_routes(self, routes: frozenset[str]) -> None:
        self._held_routes = routes
        for connection in (self._main, self._held):
            if any(self._connection_of(each) is not connection for each in connection.requests if each.route):
                connection.abort()


def _held_routes(state: Mapping[str, object]) -> Iterator[str]:
    """Yield the routes over their quota, and those inside a long line of a FIFO, from the daemon's STAT."""
    over, busy = state.get("over_quota"), state.get("busy")
    yield from (each["route"] for each in over if isinstance(each, dict)) if isinstance(over, list) else ()
    yield from (each for each in busy if isinstance(each, str)) if isinstance(busy, list) else ()


def _busy(message: str) -> HttpError:
    return HttpError(429, "busy", message, hint="send it again; the daemon's STAT shows what is busy")


def _durable(answer: str) -> Durable:
    first, last = answer.split()
    return Durable(int(first), int(last))


def _encode(route: str, payload: bytes, producer: Producer, *, columns: bool, seen: int | None = None) -> DaemonRequest:
    line = encode_publish(Publish(route.encode(), len(payload), columns, producer.id, producer.number, seen))
    return DaemonRequest(route, line, payload)
