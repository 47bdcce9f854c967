"""Reasons why a request must wait.

What keeps a request from being taken now: a nearly full disk, a quota, or a pipe inside a long line of the route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from wald.daemon.quotas import OverQuota
from wald.format.protocol import Code, ProtocolError
from wald.writing.writer import Route


class Wait(Enum):
    """What a connection waits for if that is neither room on the disk nor a route."""

    TURN = auto()  # it has had its share of this turn
    COMMAND = auto()  # its command is carried out when it is its turn
    REFUSAL = auto()  # its route has been busy for too long
    DISK = auto()  # the disk refuses the turn that has its records


@dataclass(frozen=True, slots=True)
class Quota:
    """What a connection waits for whose route is over its quota."""

    route: str


Cause = int | str | Quota | Wait
"""Why nothing is read from a connection: the bytes of room that it needs, the name of a busy route, or as they say."""


@dataclass(frozen=True, slots=True)
class Backpressure:
    """What keeps requests from being taken now.

    Attributes:
        closed: no record may be taken at all.
        reject: refuse such records rather than let the producer wait.
        busy: names of the routes that are inside a pipe's long line.
        room_bytes: how much may be written before the gate closes.
        over: the routes that are over their quota.
        overdue: busy routes have been waited for long enough.
    """

    closed: bool
    reject: bool
    busy: frozenset[str]
    room_bytes: float
    over: Mapping[str, OverQuota] = field(default_factory=dict)
    overdue: bool = False

    def require_room(self, wanted_bytes: int = 0, promised_bytes: int = 0) -> None:
        """Require ``wanted_bytes`` of room, besides the ``promised_bytes`` that other requests may still write.

        Raises:
            ProtocolError: the disk is nearly full, and such records are rejected.
            Parked: the request has to wait.
        """
        if self.closed or self.room_bytes < wanted_bytes + promised_bytes:
            if self.reject:
                raise ProtocolError(Code.FULL, "the disk is full; STAT says what fills it")
            raise MustWait(wanted_bytes)

    def pass_through(self, route: Route) -> None:
        """Require that records of a route may be taken now.

        Raises:
            ProtocolError: the disk is nearly full, the route is over its quota or stays busy, and the request is
                rejected.
            Parked: the request has to wait.
        """
        if self.closed or self.room_bytes < 0:
            self.require_room()
        if (over := self.over.get(route.name)) is not None:
            if over.rejects:
                raise ProtocolError(Code.FULL, over.message)
            raise MustWait(Quota(route.name))
        if route.name in self.busy:
            if self.overdue:
                raise ProtocolError(Code.BUSY, f"a pipe is inside a long line of {route.name}")
            raise MustWait(route.name)

    def holds(self, cause: Cause, promised_before: Callable[[int], int]) -> bool:
        """Whether a connection with this cause has to wait on, for which others were promised so much room."""
        if cause is Wait.COMMAND or cause is Wait.DISK:
            return True
        if isinstance(cause, int):
            return self.closed or self.room_bytes < cause + (promised_before(cause) if cause else 0)
        if isinstance(cause, Quota):
            return cause.route in self.over and not self.over[cause.route].rejects
        return cause in self.busy


class MustWait(Exception):
    """The request has to wait, for bytes of room or for a route."""

    def __init__(self, cause: int | str | Quota) -> None:
        super().__init__(cause)
        self.cause: int | str | Quota = cause
