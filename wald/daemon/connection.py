"""One producer's connection: what it has sent, what it waits for, and the replies that it has not read."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from dataclasses import dataclass, field

from wald.daemon.gate import Cause
from wald.daemon.listening import process_name
from wald.daemon.spooling import Spooling
from wald.daemon.turn import Ticket
from wald.format.peers import Peer
from wald.format.protocol import Command, Publish, RequestReader

RECEIVE_BYTES = 256 << 10  # read from one connection in one turn; a unix socket holds about that much
COMMAND_RECEIVE_BYTES = 4 << 10  # from one that sends commands: they are answered slowly, and what waits is kept
SENT_AHEAD_BYTES = 16 << 10  # a socket holds more if its peer goes on sending
_UNREAD = struct.Struct("i")

Answer = bytes | Ticket | Command
"""A reply, a claim on one that the commit makes good, or a command that is carried out after the commit."""


@dataclass(slots=True)
class Connection:
    """What the daemon knows of one connection.

    Attributes:
        active_at: when a request was last begun, was whole or brought 256 KiB, when a reply was last sent, or when any
            of this became possible; on the monotonic clock.
        served: the number of the turn in which something of it was last taken.
        proven: a whole request has come from it, or 256 KiB of one.
        slow_bytes: what has come of a request since ``active_at``.
        received_bytes: what has come of it in all.
        request: a PUB whose line was read and whose payload was not.
        spooling: where the payload of ``request`` goes; None while it is awaited in memory.
        waits_for: why nothing is read; None: it is read.
        command: the command to carry out, while it waits for that.
        receive_bytes: how much is read at a time.
        answers: this turn's replies, in order.
        unsent: replies that the socket did not take.
        closing: nothing more is read, and the connection ends with its last reply.
    """

    socket: socket.socket
    user_id: int
    process_id: int
    active_at: float
    reader: RequestReader
    served: int = 0
    proven: bool = False
    slow_bytes: int = 0
    received_bytes: int = 0
    request: Publish | None = None
    spooling: Spooling | None = None
    waits_for: Cause | None = None
    command: Command | None = None
    receive_bytes: int = COMMAND_RECEIVE_BYTES
    answers: list[Answer] = field(default_factory=list)
    unsent: bytes | memoryview = b""
    closing: bool = False
    known_peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        """Who its batches are from. The name is looked up with the first of them: those who only ask cost nothing."""
        if self.known_peer is None:
            self.known_peer = Peer(self.user_id, self.process_id, process_name(self.process_id))
        return self.known_peer

    def as_sender(self) -> dict[str, object]:
        """Who has sent how much, as STAT reports it."""
        process = self.known_peer.process if self.known_peer else ""
        return {"user": self.user_id, "pid": self.process_id, "process": process, "bytes": self.received_bytes}

    @property
    def is_settled(self) -> bool:
        """Whether the peer behaves as a client does: it has sent a request, and reads its replies."""
        return self.proven and not self.unsent

    @property
    def may_yield(self) -> bool:
        """Whether it can be closed for another: its peer does not read, or nothing of a proven one is under way."""
        if self.unsent:
            return True
        return self.idle if self.proven else self.waits_for is None and not _is_readable(self.socket)

    def has_sent(self, length: int, now: float, *, begun: bool, whole: bool) -> None:
        """Note what came; of a request that has ``begun`` before, less than 256 KiB do not count as activity."""
        self.slow_bytes += length
        self.received_bytes += length
        if whole or self.slow_bytes >= RECEIVE_BYTES:
            self.proven = True
        elif begun:
            return
        self.active_at, self.slow_bytes = now, 0

    @property
    def unfinished(self) -> bool:
        """Whether a request has begun and its rest is awaited."""
        return self.waits_for is None and self.is_inside_request

    @property
    def has_sent_ahead(self) -> bool:
        """Whether the rest of a payload that is not read now has come, or as much as comes of a large one."""
        missing = self.spooling.missing_bytes if self.spooling else self.request.payload_bytes if self.request else 0
        return len(self.reader.kept) + _unread_bytes(self.socket) >= min(missing, SENT_AHEAD_BYTES)

    @property
    def idle(self) -> bool:
        """Whether nothing of it is awaited or under way, on either side."""
        pending = self.is_inside_request or self.unsent or self.answers
        return not pending and self.waits_for is None and not _is_readable(self.socket)

    @property
    def wanted_events(self) -> int:
        """What the poller shall report; that the peer is gone it reports always."""
        if self.unsent:
            return select.EPOLLOUT
        return select.EPOLLIN if self.waits_for is None else 0

    @property
    def is_inside_request(self) -> bool:
        """Whether a request has begun whose end was not read."""
        return self.request is not None or self.reader.unfinished


def _unread_bytes(connection: socket.socket) -> int:
    """How much has come that was not read."""
    (length,) = _UNREAD.unpack(fcntl.ioctl(connection, termios.FIONREAD, bytes(_UNREAD.size)))
    return int(length)


def _is_readable(connection: socket.socket) -> bool:
    """Whether something has come that was not read, or the peer is gone."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
