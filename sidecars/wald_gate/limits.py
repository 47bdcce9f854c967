"""Limits on clients: connections, rates and concurrent requests, size and time of bodies, and memory for records.

A client is identified by its token, certificate or user; anonymous clients are identified by their address.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from wald.format.protocol import FRAME_MAX_BYTES
from wald_gate.problems import HttpError
from wald_gate.settings import LimitSettings

_ROOM_SECONDS = 0.5
_CLIENTS_MAX = 10_000  # with an allowance


class Ended(StrEnum):
    """Reasons why the gate closes a connection."""

    MADE_WAY = "made way"
    """It was idle, and a new connection needed its place."""
    NO_PLACE = "no place"
    HEAD_SIZE = "head too large"
    HOST = "no host, or several"
    HEAD_TIME = "head too slow"
    SEND_TIME = "answer not taken"
    REST = "body after its answer"
    PIPELINED = "too many requests at once"
    CERTIFICATE = "certificate refused"


class Open(Protocol):
    """A connection whose TLS handshake is done."""

    transport: asyncio.Transport

    def shut_down(self) -> None:
        """Close it once its requests are answered."""

    def distrust(self) -> None:
        """Drop the client's certificate; if there was one, close the connection after its answers."""


@dataclass
class ConnectionPool:
    """All connections of a gate, with their limits.

    ``idle`` has functions that close idle connections and unfinished handshakes, longest idle first.
    """

    limits: LimitSettings  # SIGHUP may replace them
    is_proxy: Callable[[str], bool] = lambda _: False  # True for an address whose connections belong to many clients
    open: set[Open] = field(default_factory=set)
    idle: OrderedDict[object, Callable[[], object]] = field(default_factory=OrderedDict)
    count: int = 0  # of connections, handshakes included
    open_from: Counter[str] = field(default_factory=Counter)  # by address, or by user of the unix socket
    ended: Counter[Ended] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # of the requests in flight

    def enter(self, client: str) -> bool:
        """Count a new connection; return False if it exceeds a limit. :meth:`leave` must follow in either case."""
        self.count += 1
        self.open_from[client] += 1
        limits = self.limits
        bound = limits.connections_per_address
        if bound and self.open_from[client] > bound and not self.is_proxy(client):
            self.ended[Ended.NO_PLACE] += 1
            return False
        if self.count > limits.connections_max:
            if not self.idle:
                self.ended[Ended.NO_PLACE] += 1
                return False
            self.ended[Ended.MADE_WAY] += 1
            _, close = self.idle.popitem(last=False)
            close()
        return True

    def leave(self, client: str) -> None:
        self.count -= 1
        self.open_from[client] -= 1
        if not self.open_from[client]:
            del self.open_from[client]


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
                    while not self._fits(size):
                        if self._limits.given_back is None:
                            self._limits.given_back = asyncio.Event()
                        await self._limits.given_back.wait()
            except TimeoutError:
                raise self._memory_error() from None
        self.count(size)

    def count(self, size: int) -> None:
        """Count ``size`` bytes even if they exceed the limit."""
        more = max(0, size - FRAME_MAX_BYTES) - self._counted
        self._counted += more
        self._limits.kept_bytes += more
        if more < 0 and self._limits.given_back is not None:
            self._limits.given_back.set()
            self._limits.given_back = None

    def give_back(self) -> None:
        if self._counted:
            self.count(0)

    def _fits(self, size: int) -> bool:
        if size <= FRAME_MAX_BYTES:
            return True
        more = size - FRAME_MAX_BYTES - self._counted
        return self._limits.kept_bytes + more <= self._limits.settings.kept_max_bytes

    def _memory_error(self) -> HttpError:
        kept, most = self._limits.kept_bytes, self._limits.settings.kept_max_bytes
        message = f"the gate keeps {kept} bytes of records for its clients; the limit is {most}"
        return HttpError(503, "memory", message, hint="kept_max_bytes in [limits] of the gate's config file")


@dataclass
class Limits:
    """The current limits and hosts, which SIGHUP may change, and the memory in use.

    The memory is that of all requests beyond 128 KiB each: unfinished records, and leased ones until their client has
    received them.
    """

    settings: LimitSettings
    hosts: tuple[str, ...] = ()
    kept_bytes: int = 0
    given_back: asyncio.Event | None = None  # set when memory is released; None if no request waits for that


@dataclass(slots=True)
class Allowance:
    """Two token buckets of one client, of requests and of bytes, and its requests in flight."""

    requests: float  # remaining tokens; an overdraft delays the next requests
    sent_bytes: float
    at: float  # monotonic time of the last refill
    in_flight: int = 0


class Allowances:
    """The allowances of all clients."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of: OrderedDict[str, Allowance] = OrderedDict()
        self._rates = (0, 0)

    def begin(self, client: str) -> Allowance:
        """Start a request; its end decrements ``in_flight``."""
        limits = self._limits.settings
        rates = limits.requests_per_second, limits.bytes_per_second
        if rates != self._rates:  # they have changed: all buckets are full
            self._rates = rates
            for each in self._of.values():
                each.requests, each.sent_bytes = rates
        found = self._of.get(client)
        if found is None:
            if len(self._of) >= _CLIENTS_MAX:  # forget the one that has been idle for longest
                self._of.pop(next((name for name, each in self._of.items() if not each.in_flight), ""), None)
            found = self._of[client] = Allowance(*rates, time.monotonic())
        self._of.move_to_end(client)
        if found.in_flight >= limits.requests_at_once:
            raise _refused(f"{client} has {found.in_flight} requests in flight", 1)
        if any(rates):
            self._refill(client, found)
        found.in_flight += 1
        return found

    def _refill(self, client: str, found: Allowance) -> None:
        """Refill the buckets, and take a token for a request; raise HttpError 429 if none is left."""
        requests, sent_bytes = self._rates
        now = time.monotonic()
        passed, found.at = now - found.at, now
        found.requests = min(found.requests + passed * requests, requests)
        found.sent_bytes = min(found.sent_bytes + passed * sent_bytes, sent_bytes)
        if requests and found.requests < 1:
            seconds = (1 - found.requests) / requests
            raise _refused(f"{client} may send {requests} requests a second", seconds)
        if sent_bytes and found.sent_bytes <= 0:
            seconds = (1 - found.sent_bytes) / sent_bytes
            raise _refused(f"{client} may send {sent_bytes} bytes a second", seconds)
        found.requests -= 1


def _refused(message: str, seconds: float) -> HttpError:
    return HttpError(429, "too-many", message, hint="[limits] of the gate's config file", retry=seconds)
