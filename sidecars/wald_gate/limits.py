"""Limits on clients: rates and concurrent requests, the size and the time of bodies, and memory for records.

A client is identified by its token, certificate or user; anonymous clients are identified by their address.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from wald.format.protocol import FRAME_MAX_BYTES
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.settings import LimitSettings

COMPLETE = "wald.complete"
"""Key in the scope once the whole body has arrived, so that it needs no timer."""
ALLOWANCE = "wald.allowance"
"""Key in the scope of a request: the :class:`Allowance` of its client."""
_STEP_BYTES = 64 << 10
_ROOM_SECONDS = 0.5
_CLIENTS_MAX = 10_000  # with an allowance


class MemoryReservation:
    """Memory of a request within the limit of all requests, not counting 128 KiB for each."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counted = 0

    def keep(self, size: int) -> None:
        """Reserve ``size`` bytes in total."""
        if not self._fits(size):
            raise self._memory_error()
        self.count(size)

    async def reserve(self, size: int) -> None:
        """Like :meth:`keep`, but wait half a second for memory and cap ``size`` at the limit of all requests."""
        size = min(size, self._limits.settings.kept_max_bytes)
        if not self._fits(size):
            try:
                async with asyncio.timeout(_ROOM_SECONDS):
                    await self._room(size)
            except TimeoutError:
                raise self._memory_error() from None
        self.count(size)

    async def _room(self, size: int) -> None:
        """Wait until ``size`` bytes fit."""
        while not self._fits(size):
            if self._limits.given_back is None:
                self._limits.given_back = asyncio.Event()
            await self._limits.given_back.wait()

    def count(self, size: int) -> None:
        """Count ``size`` bytes even if they exceed the limit."""
        more = max(0, size - FRAME_MAX_BYTES) - self._counted
        self._counted += more
        self._limits.kept_bytes += more
        if more < 0 and self._limits.given_back is not None:
            self._limits.given_back.set()
            self._limits.given_back = None

    def give_back(self) -> None:
        """Release everything."""
        self.count(0)

    def _fits(self, size: int) -> bool:
        more = max(0, size - FRAME_MAX_BYTES) - self._counted
        return more <= 0 or self._limits.kept_bytes + more <= self._limits.settings.kept_max_bytes

    def _memory_error(self) -> HttpError:
        kept, most = self._limits.kept_bytes, self._limits.settings.kept_max_bytes
        return HttpError(
            503,
            "memory",
            f"the gate keeps {kept} bytes of records for its clients, and may keep {most}",
            hint="kept_max_bytes in [limits] of the gate's file of settings",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )


@dataclass
class Limits:
    """The current limits, and the memory in use.

    Attributes:
        settings, hosts: current values; SIGHUP may change them.
        kept_bytes: memory of all requests, not counting 128 KiB for each: unfinished records, and leased ones until
            their client has received them.
        given_back: set when memory is released; None if no request waits for that.
    """

    settings: LimitSettings
    hosts: tuple[str, ...] = ()
    kept_bytes: int = 0
    given_back: asyncio.Event | None = None

    @contextmanager
    def keeping(self) -> Iterator[MemoryReservation]:
        """Yield the reservation of a request, which is released at the end."""
        kept = MemoryReservation(self)
        try:
            yield kept
        finally:
            kept.give_back()

    async def chunks(self, request: Request, *, counted: bool = True) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Args:
            counted: count its bytes against the client; those of a compressed body count after decompression.
        """
        allowance = request.scope.get(ALLOWANCE) if counted else None
        if COMPLETE in request.scope:  # a small body, which needs no timer
            body = await request.body()
            if allowance is not None:
                allowance.count_bytes(len(body))
            yield body
            return
        chunks, loop = request.stream(), asyncio.get_running_loop()
        deadline, came = loop.time() + self.settings.body_timeout, 0
        while True:
            chunk = await (anext(chunks, None) if COMPLETE in request.scope else self._in_time(chunks, deadline))
            if chunk is None:
                return
            came += len(chunk)
            if came >= _STEP_BYTES:
                deadline, came = loop.time() + self.settings.body_timeout, 0
            if allowance is not None:
                allowance.count_bytes(len(chunk))
            yield chunk

    async def _in_time(self, chunks: AsyncIterator[bytes], deadline: float) -> bytes | None:
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(chunks, None)
        except TimeoutError:
            message = f"in {self.settings.body_timeout:g} s less than {_STEP_BYTES} bytes of the body came"
            raise HttpError(408, "timeout", message, headers={"Connection": "close"}) from None

    async def read(self, request: Request, what: str = "a body of JSON", most: int | None = None) -> bytes:
        """Read a small body.

        Args:
            most: maximum number of bytes; None for the limit of JSON bodies.
        """
        most = self.settings.json_max_bytes if most is None else most
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks(request):
            parts.append(chunk)
            size += len(chunk)
            if size > most:
                raise HttpError(413, "too-large", f"{what} has at most {most} bytes")
        return b"".join(parts)


@dataclass(slots=True)
class Allowance:
    """Two token buckets of one client, of requests and of bytes, and its requests in flight.

    Attributes:
        requests, sent_bytes: remaining tokens; negative after an overdraft.
        at: monotonic time of the last refill.
    """

    requests: float
    sent_bytes: float
    at: float
    in_flight: int = 0

    def end(self) -> None:
        """Count a request as answered."""
        self.in_flight -= 1

    def count_bytes(self, count: int) -> None:
        """Charge bytes of a body; an overdraft delays the next requests."""
        self.sent_bytes -= count


class Allowances:
    """The allowances of all clients.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._of: OrderedDict[str, Allowance] = OrderedDict()
        self._rates = (0, 0)

    def begin(self, client: str) -> Allowance:
        """Begin a request; :meth:`Allowance.end` must follow."""
        limits, now = self._limits.settings, self._clock()
        self._reset((limits.requests_per_second, limits.bytes_per_second))
        found = self._of.get(client)
        if found is None:
            found = self._of[client] = Allowance(limits.requests_per_second, limits.bytes_per_second, now)
            self._forget()
        self._of.move_to_end(client)
        passed, found.at = now - found.at, now
        found.requests = min(found.requests + passed * limits.requests_per_second, limits.requests_per_second)
        found.sent_bytes = min(found.sent_bytes + passed * limits.bytes_per_second, limits.bytes_per_second)
        if found.in_flight >= limits.requests_at_once:
            raise _refused(f"{client} has {found.in_flight} requests in flight", 1)
        if limits.requests_per_second and found.requests < 1:
            seconds = (1 - found.requests) / limits.requests_per_second
            raise _refused(f"{client} may ask {limits.requests_per_second} times a second", seconds)
        if limits.bytes_per_second and found.sent_bytes <= 0:
            seconds = (1 - found.sent_bytes) / limits.bytes_per_second
            raise _refused(f"{client} may send {limits.bytes_per_second} bytes a second", seconds)
        found.requests -= 1
        found.in_flight += 1
        return found

    def _reset(self, rates: tuple[int, int]) -> None:
        """Refill all buckets when the limits change."""
        if rates != self._rates:
            self._rates = rates
            for each in self._of.values():
                each.requests, each.sent_bytes = rates

    def _forget(self) -> None:
        """Forget the client that has been idle for longest, and has no request in flight."""
        if len(self._of) > _CLIENTS_MAX:
            idle = next((client for client, each in self._of.items() if not each.in_flight), None)
            if idle is not None:
                del self._of[idle]


def _refused(message: str, seconds: float) -> HttpError:
    return HttpError(
        429,
        "too-many",
        message,
        hint="[limits] of the gate's file of settings",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )
