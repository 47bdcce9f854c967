"""One producer's connection: what it has sent, what it waits for, and what it has not been told yet."""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass, field

from wald.daemon.gate import Cause
from wald.daemon.publishing import Answer
from wald.daemon.spooling import Spooling
from wald.format.protocol import Command

RECEIVE_BYTES = 256 << 10  # read from one connection in one turn; a unix socket holds about that much
ASKING_RECEIVE_BYTES = 4 << 10  # from who asks instead of publishing: it is answered slowly, and what waits is kept


@dataclass(slots=True)
class Connection:
    """What the daemon knows of one.

    Attributes:
        kept: bytes that were read and are no whole request yet.
        skip_bytes: of a refused payload, still to be passed over.
        answers: this turn's replies, in order; a ticket becomes bytes after the commit.
        waits_for: why nothing is read; None: it is.
        command: what it asked for, while it waits for that.
        receive_bytes: how much is read at a time.
        since: when something last came or went, or could, on the monotonic clock.
    """

    socket: socket.socket
    user_id: int
    since: float
    kept: bytes = b""
    skip_bytes: int = 0
    spooling: Spooling | None = None
    waits_for: Cause | None = None
    command: Command | None = None
    receive_bytes: int = ASKING_RECEIVE_BYTES
    closing: bool = False
    unsent: bytes | memoryview = b""
    answers: list[Answer | Command] = field(default_factory=list)

    @property
    def gathered(self) -> bool:
        """Whether a payload is whole in its file and has not been handed on."""
        return self.spooling is not None and self.spooling.missing_bytes == 0

    @property
    def unfinished(self) -> bool:
        """Whether a request has begun and its rest is awaited."""
        return bool(self.kept or self.skip_bytes or self.spooling) and self.waits_for is None

    @property
    def idle(self) -> bool:
        """Whether nothing of it is awaited or under way, on either side."""
        held = self.kept or self.skip_bytes or self.spooling or self.unsent or self.answers
        return not held and self.waits_for is None and not _is_readable(self.socket)

    @property
    def wanted_events(self) -> int:
        """What the poller shall tell of; that the peer is gone it tells always."""
        if self.unsent:
            return select.EPOLLOUT
        return select.EPOLLIN if self.waits_for is None else 0


def _is_readable(connection: socket.socket) -> bool:
    """Whether something has come that was not read, or the peer is gone."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
