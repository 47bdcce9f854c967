"""The connections of a gate, with limits on their number: a new one may take the place of one that is idle."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from wald_gate.settings import LimitSettings


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


class Idle(Protocol):
    """A connection or a handshake that waits for its client."""

    def evict(self) -> None:
        """Close it."""


class Open(Idle, Protocol):
    """A connection whose TLS handshake is done."""

    def has_unsent(self) -> bool:
        """Return True if a part of an answer is not sent yet."""

    def shut_down(self) -> None:
        """Close it once its requests are answered."""

    def distrust(self) -> None:
        """Forget the client's certificate, and close the connection after its answers if it had one."""


@dataclass
class ConnectionPool:
    """All connections of a gate, with their limits.

    Attributes:
        limits: the current limits; SIGHUP may replace them.
        is_proxy: returns True for the address of a proxy, whose connections belong to many clients.
        open: connections whose TLS handshake is done.
        idle: connections without a request, and unfinished handshakes; the one that has waited longest comes first.
        count: number of connections, handshakes included.
        open_from: number of connections per address, or per user of the unix socket.
        ended: number of connections that were closed, by reason.
        tasks: the requests in flight.
    """

    limits: LimitSettings
    is_proxy: Callable[[str], bool] = lambda _: False
    open: set[Open] = field(default_factory=set)
    idle: OrderedDict[Idle, None] = field(default_factory=OrderedDict)
    count: int = 0
    open_from: Counter[str] = field(default_factory=Counter)
    ended: Counter[Ended] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def enter(self, client: str) -> bool:
        """Count a new connection; return False if it does not fit. :meth:`leave` must follow in any case."""
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
            longest.evict()
        return True

    def leave(self, client: str) -> None:
        """Stop counting a connection."""
        self.count -= 1
        self.open_from[client] -= 1
        if not self.open_from[client]:
            del self.open_from[client]
