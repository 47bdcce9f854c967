"""Requests to the daemon: many under way over one connection, and those that the daemon lets wait over another.

Each request that stores records has the id of a producer and a number, so that the daemon recognises it when it comes
again. An id has one request under way at a time, and of all ids the lanes send so many at a time that the daemon still
remembers each. Ids are used again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.client.connection import status
from wald.client.session import Durable, error_after_retries, permanent_error
from wald.errors import Refused, Unavailable, WaldError
from wald.format.protocol import Code, ProtocolError, Publish, encode_publish
from wald_gate.incoming.lane import Lane, Request
from wald_gate.monitoring.counts import Published
from wald_gate.problems import RETRY_SECONDS, HttpError

_OVERTAKEN = frozenset({Code.GAP, Code.FORGOTTEN, Code.CONFLICT})
_LOOK_SECONDS = 1.0


class Overtaken(Refused):
    """The number of a request is not the next one of its producer; ``code`` says why."""

    def __init__(self, message: str, *, hint: str = "", code: Code | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


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
        require: raises an error if the connected daemon serves another log, or an older copy of this one.

    Attributes:
        patience: the same.
        published: for the metrics.
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
            Lane(socket, self.published, seconds=patience, send_again=self._send, require=require) for _ in range(2)
        )
        self._held_routes: frozenset[str] = frozenset()  # of which all goes over the second connection
        self._asking: dict[str, asyncio.Future[WaldError]] = {}  # why the daemon does not answer
        self._task = asyncio.create_task(self._look(), name="wald-gate-held-routes")

    async def publish(self, route: str, payload: bytes, *, columns: bool) -> Durable:
        """Store records; they are on disk when this returns.

        Raises:
            WaldError: nothing of it is stored; but of Unavailable and DiskFailure it may be, later.
        """
        producer = self._idle.pop() if self._idle else Producer()
        end = self._deadline()
        try:
            durable = await self._publish_next(producer, route, payload, columns=columns, end=end)
        except Overtaken as overtaken:
            if overtaken.code is not Code.GAP:
                raise
            self._idle.clear()  # the log was copied back: it lacks what was stored under them
            producer = Producer()
            durable = await self._publish_next(producer, route, payload, columns=columns, end=end)
        self._idle.append(producer)  # not where the last number may be in the log or not
        return durable

    async def _publish_next(
        self, producer: Producer, route: str, payload: bytes, *, columns: bool, end: float
    ) -> Durable:
        producer.number += 1
        return await self._publish(_publishing(route, payload, producer, columns=columns), end)

    async def publish_as(self, producer: Producer, route: str, payload: bytes, *, seen: int, until: float) -> Durable:
        """Store columns under an id and a number that the caller has chosen.

        Args:
            seen: the sequence up to which the caller knows what is stored under this id.
            until: the time of the loop at which this is given up.

        Raises:
            Overtaken: something else is stored under this number, it is not the next one, or the daemon has forgotten
                the id, of which something may be stored behind ``seen``.
            WaldError: as of :meth:`publish`.
        """
        return await self._publish(_publishing(route, payload, producer, columns=True, seen=seen), until)

    async def command(self, *words: str) -> str:
        """Carry out what is no PUB; the text behind OK.

        Raises:
            WaldError: as of :meth:`publish`.
        """
        return await self._ask(Request("", " ".join(words).encode() + b"\n", b""), self._deadline())

    async def close(self) -> None:
        """Close the connections; what is under way may be carried out or not."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._main.close()
        await self._held.close()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.patience

    async def _publish(self, request: Request, end: float) -> Durable:
        began = time.perf_counter()
        try:
            first, last = (await self._ask(request, end)).split()
        finally:
            self.published.seconds.observe(time.perf_counter() - began)
        return Durable(int(first), int(last))

    async def _ask(self, request: Request, end: float) -> str:
        timer = asyncio.get_running_loop().call_at(end, request.give_up)  # a third of what asyncio.timeout takes
        try:
            self._send(request)
            return await request.answer
        except TimeoutError:
            self._forget(request)
            raise await self._asked(request.trouble or TimeoutError()) from None
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
        for lane in (self._main, self._held):
            lane.forget(request)

    async def _asked(self, reason: OSError | ProtocolError) -> WaldError:
        """The error for a request that was tried for long enough: asked once for all that end at the same time."""
        key = repr(reason)
        if (asking := self._asking.get(key)) is None:
            asking = self._asking[key] = asyncio.ensure_future(asyncio.to_thread(self._unreachable, reason))
            asking.add_done_callback(lambda _: self._asking.pop(key))
        return (await asyncio.shield(asking)).with_traceback(None)

    def _unreachable(self, reason: OSError | ProtocolError) -> WaldError:
        """The error for a request that was tried for long enough; what is busy is no fault of the log."""
        if isinstance(reason, ProtocolError) and reason.code is Code.BUSY:
            return _busy(reason.message)
        if isinstance(reason, TimeoutError) and isinstance(routes := status(self._socket).get("busy"), list) and routes:
            return _busy(f"a pipe is in the middle of a long line for route {routes[0]}, and requests wait for its end")
        return error_after_retries(reason, root=self._root, socket=self._socket)

    def _lane_of(self, request: Request) -> Lane:
        return self._held if request.route in self._held_routes else self._main

    def _send(self, request: Request) -> None:
        self._lane_of(request).send(request)

    async def _look(self) -> None:
        """Find the routes whose requests the daemon lets wait: behind them, all on their connection waits, too."""
        oldest: Request | None = None
        while True:
            before, oldest = oldest, self._main.under_way[0] if self._main.under_way else None
            is_stuck = oldest is not None and oldest is before
            if (self._held_routes or is_stuck) and (state := await asyncio.to_thread(status, self._socket)):
                self._hold(frozenset(_held(state)))
            await asyncio.sleep(_LOOK_SECONDS)

    def _hold(self, routes: frozenset[str]) -> None:
        self._held_routes = routes
        for lane in (self._main, self._held):
            if any(self._lane_of(request) is not lane for request in lane.requests() if request.route):
                lane.break_off()


def _held(state: Mapping[str, object]) -> Iterator[str]:
    """The routes that are over their quota or inside a long line of a FIFO, by the STAT of the daemon."""
    over, busy = state.get("over_quota"), state.get("busy")
    yield from (each["route"] for each in over if isinstance(each, dict)) if isinstance(over, list) else ()
    yield from (each for each in busy if isinstance(each, str)) if isinstance(busy, list) else ()


def _busy(message: str) -> HttpError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return HttpError(429, "busy", message, hint="send it again; STAT of the daemon says what is busy", headers=headers)


def _publishing(route: str, payload: bytes, producer: Producer, *, columns: bool, seen: int | None = None) -> Request:
    line = encode_publish(Publish(route.encode(), len(payload), columns, producer.id, producer.number, seen))
    return Request(route, line, payload)
