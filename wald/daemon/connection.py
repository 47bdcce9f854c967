"""State machine of one connection, without input or output.

One producer's connection: what it has sent, what it waits for, and the replies that it has not read.

What becomes of the requests of a connection: a payload joins the turn, a command waits to be carried out.

A payload lies in the turn's arena until it is durable. What is not whole at the end of a turn is kept by the reader of
its connection, up to 256 KiB; a larger payload gathers in an unnamed file, so a 40 MB record costs disk, not memory.
A request is admitted when its line has come and again when its payload is whole: the disk may have filled up since,
and a pipe may have begun a long line on its route. One that cannot be taken now makes its connection wait.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stringzilla import count as count_bytes

from wald.daemon.backpressure import Backpressure, Cause, MustWait, Wait
from wald.daemon.commands import Routes
from wald.daemon.committer import Arena, CommitRound, Spooling, Ticket
from wald.daemon.listening import process_name
from wald.errors import DISK_FULL
from wald.format.log_state import DedupEntry, Peer, stored_producer_id
from wald.format.protocol import Code, Command, ProtocolError, Publish, RequestReader, encode_err
from wald.format.records import BadColumns, decode_columns
from wald.writing.writer import Route

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
        return len(self.reader.leftover) + _unread_bytes(self.socket) >= min(missing, SENT_AHEAD_BYTES)

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


KEPT_TOTAL_MAX_BYTES = 8 << 20  # of unfinished requests in memory; beyond it even small payloads are spooled
SMALL_ROOM_BYTES = 2 * RECEIVE_BYTES  # what a payload takes that is spooled only because memory is full
QUICK = frozenset({"PING", "HEAD"})  # answered after the commit of what came before them, as records are
QUICK_MAX = 32  # of one connection in one turn
ANSWERS_MAX = 512  # to one connection in one turn
_NEWLINE = ord("\n")


class Requests:
    """Takes the requests of all connections.

    Args:
        spool_directory: where large payloads gather; on the file system of the segments.
        leaves_enough: whether the daemon still has the descriptors it needs if the newest is this one.

    Attributes:
        kept_bytes: of unfinished requests, in memory.
    """

    def __init__(self, routes: Routes, spool_directory: Path, leaves_enough: Callable[[int], bool]) -> None:
        self._routes = routes
        self._spool_directory = spool_directory
        self._leaves_enough = leaves_enough
        self._gathered: list[Spooling] = []
        self.kept_bytes = 0
        self._promised_small_bytes = self._promised_large_bytes = 0  # what payloads in files may still take on the disk

    @property
    def receive_max_bytes(self) -> int:
        """How much may be read from one connection now."""
        return RECEIVE_BYTES if self.kept_bytes < KEPT_TOTAL_MAX_BYTES else COMMAND_RECEIVE_BYTES

    def promised_before(self, wanted_bytes: int) -> int:
        """The room promised to others that has to be left by a request for ``wanted_bytes`` of room.

        A small one leaves large ones what they have written, as one that fits in memory does: most of what was
        announced may never come.
        """
        large = self._promised_large_bytes if wanted_bytes > SMALL_ROOM_BYTES else 0
        return self._promised_small_bytes + large

    def take(
        self, connection: Connection, turn: CommitRound, arena: Arena, gate: Backpressure, end: int
    ) -> Cause | None:
        """Take the requests that are whole, from the end of what ``arena`` has handed out up to ``end``.

        Returns:
            what the connection has to wait for; None: for the rest of its next request.
        """
        reader = connection.reader
        kept_bytes = len(reader.leftover)
        reader.feed(arena.buffer, arena.used, end)
        try:
            return self._take_whole(connection, turn, gate)
        except MustWait as parked:
            return parked.cause
        finally:
            arena.used = reader.release()
            self.kept_bytes += len(reader.leftover) - kept_bytes

    def forget(self, connection: Connection) -> None:
        """Let go of what a connection that ends has left unfinished."""
        self.kept_bytes -= len(connection.reader.leftover)
        self._drop_spooling(connection)

    def end_turn(self) -> None:
        """Close the files whose payloads are in the log, or refused."""
        for spooling in self._gathered:
            spooling.close()
        self._gathered.clear()

    def _take_whole(self, connection: Connection, turn: CommitRound, gate: Backpressure) -> Cause | None:
        reader, answers = connection.reader, connection.answers
        quick = 0
        while connection.request is None or self._publish(connection, connection.request, turn, gate):
            if quick == QUICK_MAX or len(answers) >= ANSWERS_MAX:
                return Wait.TURN if reader.has_unread else None
            event = reader.next_event()
            if isinstance(event, Publish):
                connection.request = event
            elif event is None:
                break
            elif isinstance(event, ProtocolError):
                answers.append(encode_err(event.code, event.message))
                connection.closing = reader.closed
            else:
                connection.receive_bytes = COMMAND_RECEIVE_BYTES
                if event.verb not in QUICK:
                    connection.command = event
                    return Wait.COMMAND
                answers.append(event)
                quick += 1
        return None

    def _publish(self, connection: Connection, request: Publish, turn: CommitRound, gate: Backpressure) -> bool:
        """Take the payload of ``request``, or refuse it; False if its rest has to come first.

        Raises:
            Parked: it has to wait.
        """
        connection.receive_bytes = RECEIVE_BYTES
        try:
            if connection.spooling is None:
                route = self._routes.find(request.route, connection.user_id)
                gate.pass_through(route)
                payload = connection.reader.read_payload()
                if payload is not None:
                    connection.answers.append(publish_whole(turn, connection.peer, route, request, payload))
                    connection.request = None
                    return True
                if self._fits(request):
                    return False
                connection.spooling = self._open_spool(request, route, gate)
            return self._spool(connection, connection.spooling, turn, gate)
        except ProtocolError as error:
            connection.answers.append(encode_err(error.code, error.message))
            connection.reader.skip_payload()
            connection.request = None
            self._drop_spooling(connection)
            return True

    def _fits(self, request: Publish) -> bool:
        """Whether the rest of a payload is awaited in memory."""
        expected = request.payload_bytes
        return expected <= RECEIVE_BYTES and self.kept_bytes + expected <= KEPT_TOTAL_MAX_BYTES

    def _open_spool(self, request: Publish, route: Route, gate: Backpressure) -> Spooling:
        wanted = _room_bytes(request)
        gate.require_room(wanted, self.promised_before(wanted))
        try:
            spooling = Spooling(request, route, self._spool_directory)
        except OSError as error:
            raise _no_spool(error) from error
        if not self._leaves_enough(spooling.descriptor):
            spooling.close()
            raise ProtocolError(Code.FAILED, "too few descriptors are left")
        self._promise(spooling, spooling.promised_bytes)
        return spooling

    def _spool(self, connection: Connection, spooling: Spooling, turn: CommitRound, gate: Backpressure) -> bool:
        """Write what has come of a payload into its file; when it is whole, take it. As :meth:`_publish`."""
        if spooling.missing_bytes:
            gate.require_room()  # again: others may have used it up since the request began
            before = spooling.promised_bytes
            try:
                spooling.feed(connection.reader.read_part())
            except OSError as error:
                raise _no_spool(error) from error
            finally:
                self._promise(spooling, spooling.promised_bytes - before)
        if spooling.missing_bytes:
            return False
        # Check again: since the request began, the route may have been retired, or a pipe may have begun a long line.
        gate.pass_through(self._routes.find(spooling.request.route, connection.user_id))
        connection.answers.append(publish_spooled(turn, spooling, connection.peer))
        connection.request = connection.spooling = None
        self._promise(spooling, -spooling.promised_bytes)
        self._gathered.append(spooling)
        return True

    def _promise(self, spooling: Spooling, change: int) -> None:
        """Promise a payload more room, or less."""
        if _room_bytes(spooling.request) > SMALL_ROOM_BYTES:
            self._promised_large_bytes += change
        else:
            self._promised_small_bytes += change

    def _drop_spooling(self, connection: Connection) -> None:
        if connection.spooling is not None:
            self._promise(connection.spooling, -connection.spooling.promised_bytes)
            connection.spooling.close()
            connection.spooling = None


def ok(first: int, last: int) -> bytes:
    """The reply to what is durable."""
    return b"OK %d %d\n" % (first, last)


def publish_whole(turn: CommitRound, peer: Peer, route: Route, request: Publish, payload: memoryview) -> bytes | Ticket:
    """Hand a peer's whole payload to the turn.

    Raises:
        ProtocolError: it is malformed, or :meth:`Turn.publish` refuses it.
    """
    if request.columns:
        count = _records(lambda: decode_columns(payload).count)
    elif payload and payload[-1] == _NEWLINE:
        count = int(count_bytes(payload, b"\n"))
        if not request.producer_id:
            return turn.publish_lines(route, payload, count, peer)
    else:
        raise _unterminated()
    producer_id = stored_producer_id(peer.user, request.producer_id)
    return _answer(turn.publish(request, producer_id, route, payload, count, peer))


def publish_spooled(turn: CommitRound, spooling: Spooling, peer: Peer) -> bytes | Ticket:
    """Hand a peer's payload, whole in its file, to the turn; errors as of :func:`publish_whole`."""
    request = spooling.request
    if request.columns:
        count = _records(spooling.columns_count)
    elif spooling.ends_in_newline:
        count = spooling.newlines
    else:
        raise _unterminated()
    producer_id = stored_producer_id(peer.user, request.producer_id)
    return _answer(turn.publish(request, producer_id, spooling.route, None, count, peer, spooling))


def _room_bytes(request: Publish) -> int:
    """What a payload takes that gathers in a file: it is copied from there, so it is its size twice."""
    return 2 * request.payload_bytes


def _records(count: Callable[[], int]) -> int:
    """How many records columns hold, as ``count`` finds out."""
    try:
        records = count()
    except BadColumns as error:
        raise ProtocolError(Code.BAD_COLUMNS, str(error)) from None
    if records == 0:
        raise ProtocolError(Code.BAD_COLUMNS, "no record")
    return records


def _unterminated() -> ProtocolError:
    return ProtocolError(Code.BAD_LINES, "the payload must end in a newline")


def _answer(result: Ticket | DedupEntry) -> bytes | Ticket:
    return result if isinstance(result, Ticket) else ok(result.first, result.last)


def _no_spool(error: OSError) -> ProtocolError:
    full = error.errno in DISK_FULL
    return ProtocolError(Code.FULL if full else Code.FAILED, str(error))
