"""What keeps a request from being taken now: a disk that is nearly full, or a route inside a pipe's long line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from wald.format.protocol import Code, ProtocolError
from wald.store.writing.drafts import Route


class Wait(Enum):
    """What a connection waits for where that is neither room on the disk nor a route."""

    TURN = auto()  # it has had its share of this turn
    COMMAND = auto()  # what it asked for is carried out when it is its turn
    REFUSAL = auto()  # its route has been busy for too long


Cause = int | str | Wait
"""Why nothing is read from a connection: so many bytes of room are missing, or that route is busy, or a ``Wait``."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What keeps requests from being taken now.

    Attributes:
        closed: no record may be taken at all; ``reject``: say so rather than let the producer wait.
        busy: names of the routes that are inside a pipe's long line; ``overdue``: they have been waited for.
        room_bytes: how much may be written before the gate closes; infinite if it never does.
    """

    closed: bool
    reject: bool
    busy: frozenset[str]
    room_bytes: float
    overdue: bool = False

    def require_room(self, payload_bytes: int = 0, promised_bytes: int = 0) -> None:
        """Let ``payload_bytes`` more be written, where others may still write ``promised_bytes``.

        Raises:
            ProtocolError: the disk is nearly full, and the producer shall hear of it.
            Parked: the request has to wait.
        """
        if self.closed or self.room_bytes < payload_bytes + promised_bytes:
            if self.reject:
                raise ProtocolError(Code.FULL, "the disk is full; STAT says what fills it")
            raise Parked(payload_bytes)

    def pass_through(self, route: Route) -> None:
        """
        Raises:
            ProtocolError: the producer shall hear that the disk is nearly full, or that its route stays busy.
            Parked: the request has to wait.
        """
        self.require_room()
        if route.name in self.busy:
            if self.overdue:
                raise ProtocolError(Code.BUSY, f"a pipe is inside a long line of {route.name}")
            raise Parked(route.name)

    def holds(self, cause: Cause) -> bool:
        """Whether what a connection waits for has not come, and will not by looking again."""
        if cause is Wait.COMMAND:
            return True
        if isinstance(cause, int):
            return self.closed or self.room_bytes < cause
        return cause in self.busy


class Parked(Exception):
    """The request has to wait, for so many bytes of room or for a route."""

    def __init__(self, cause: int | str) -> None:
        super().__init__(cause)
        self.cause: int | str = cause
