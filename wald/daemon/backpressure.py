"""Backpressure: the reasons why a request must wait, and the conditions of a commit round.

A request waits indefinitely for disk room or a quota. It waits for a busy route, in which a pipe has begun a long line,
until the timeout: then :data:`OVERDUE` replaces the wait, and the request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from wald.daemon.quotas import OverQuota
from wald.format.protocol import Code, ProtocolError
from wald.writing.writer import Route


class Reason(Enum):
    """Kind of a wait; :class:`Wait` adds the route or the number of bytes."""

    NEXT_ROUND = auto()  # the connection has used its share of this round
    COMMAND = auto()  # its command has not run yet
    HELD = auto()  # the disk refuses the round that contains its records
    OVERDUE = auto()  # the route stayed busy for too long
    ROOM = auto()
    BUSY = auto()
    QUOTA = auto()


class Wait(NamedTuple):
    """Reason why a connection is not read; connections with equal waits resume together."""

    reason: Reason
    route: str = ""
    room_bytes: int = 0


NEXT_ROUND, COMMAND, HELD, OVERDUE = map(Wait, (Reason.NEXT_ROUND, Reason.COMMAND, Reason.HELD, Reason.OVERDUE))


class MustWait(Exception):
    """Raised for a request that cannot be accepted now."""

    def __init__(self, wait: Wait) -> None:
        super().__init__(wait)
        self.wait = wait


@dataclass(slots=True)
class Backpressure:
    """Snapshot of the conditions that make requests wait."""

    is_closed: bool  # no records are accepted
    rejects_requests: bool  # requests that lack room are refused
    busy_routes: frozenset[str]  # with a long line begun in a pipe
    room_bytes: float  # until the disk counts as full
    over_quota: Mapping[str, OverQuota]
    is_open: bool = field(init=False)  # no request must wait, so callers may skip admit

    def __post_init__(self) -> None:
        self.is_open = not (self.is_closed or self.busy_routes or self.over_quota) and self.room_bytes >= 0

    def require_room(self, wanted_bytes: int = 0, promised_bytes: int = 0) -> None:
        """Raise ProtocolError or MustWait unless the disk has ``wanted_bytes`` beyond those promised to others."""
        if self.is_closed or self.room_bytes < wanted_bytes + promised_bytes:
            if self.rejects_requests:
                raise ProtocolError(Code.FULL, "the disk is full; STAT reports the cause")
            raise MustWait(Wait(Reason.ROOM, room_bytes=wanted_bytes))

    def admit(self, route: Route, *, is_overdue: bool) -> None:
        """Raise ProtocolError or MustWait unless the route accepts records.

        If the request ``is_overdue``, a busy route is an error.
        """
        if self.is_closed or self.room_bytes < 0:
            self.require_room()
        if (exceeded := self.over_quota.get(route.name)) is not None:
            if exceeded.rejects:
                raise ProtocolError(Code.FULL, exceeded.message)
            raise MustWait(Wait(Reason.QUOTA, route.name))
        if route.name in self.busy_routes:
            if is_overdue:
                raise ProtocolError(Code.BUSY, f"a pipe is in the middle of a long line for route {route.name}")
            raise MustWait(Wait(Reason.BUSY, route.name))

    def must_keep_waiting(self, wait: Wait, promised_to_others: Callable[[int], int]) -> bool:
        """Return True if connections with this wait must keep waiting."""
        match wait.reason:
            case Reason.COMMAND | Reason.HELD:
                return True
            case Reason.ROOM:
                wanted = wait.room_bytes
                return self.is_closed or self.room_bytes < wanted + (promised_to_others(wanted) if wanted else 0)
            case Reason.QUOTA:
                return wait.route in self.over_quota and not self.over_quota[wait.route].rejects
            case Reason.BUSY:
                return wait.route in self.busy_routes
        return False
