"""Sockets of the open connections: fair reading, commands, replies and timeouts.

A round serves one connection of each user, then a second of each, until its time or arena is used up; the next round
serves the rest. One command runs per round, users taking turns; while records arrive, commands get a fifth of the time.
A client must read its last reply before it is served again. An idle connection stays open until another needs its slot.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import select
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from wald.daemon.backpressure import COMMAND, HELD, NEXT_ROUND, OVERDUE, Backpressure, Reason, Wait
from wald.daemon.commands import Routes
from wald.daemon.committer import CommitRound, Spooling
from wald.daemon.connection import RECEIVE_BYTES, Connection, UnfinishedRequests
from wald.daemon.listening import ConnectionLimits, peer_of, process_name
from wald.daemon.pipes import readable_bytes
from wald.errors import DISK_FULL
from wald.format.log_state import Peer
from wald.format.protocol import Code, Command, ProtocolError, encode_err

_UNSENT_TOTAL_MAX_BYTES = 8 << 20  # of replies; above it, the least active client is closed
_COMMAND_PAUSE_MAX_SECONDS = 0.1  # between two commands while records arrive
_ROUND_SECONDS = 0.002  # a few syncs: the longest delay caused by a flood
_ACCEPTED_MAX = 32  # per round
_SENDERS_SHOWN = 5
_DISKLESS = frozenset({"PING", "HEAD", "STAT"})  # run even while the disk refuses a round
_DISK_REFUSES = encode_err(Code.FULL, "the disk refused a write; STAT reports the cause")
_SHARED_REPLIES_MAX = 16  # of a user's connections that share a reply
_SENT_AHEAD_BYTES = 16 << 10  # a client with as many is sending its payload


@dataclass(slots=True, eq=False)
class Client:
    """Socket of a connection, with state for fairness and timeouts."""

    socket: socket.socket
    descriptor: int
    user_id: int
    process_id: int
    connection: Connection
    active_at: float  # when a request began, completed or advanced by 256 KiB, or a reply was sent
    served_round: int = 0  # last round that processed input
    is_proven: bool = False  # has sent a complete request, or 256 KiB of one
    slow_bytes: int = 0  # received since active_at
    received_bytes: int = 0
    unsent: bytes | memoryview = b""  # replies that the socket did not accept
    indexed_wait: Wait | None = None  # key in the index of waiting clients
    events: int = select.EPOLLIN  # registered with the poller

    @property
    def is_replaceable(self) -> bool:
        if self.unsent:
            return True
        connection = self.connection
        if connection.wait is not None or (self.is_proven and (connection.is_inside_request or connection.answers)):
            return False
        return not _is_readable(self.socket)

    @property
    def has_sent_ahead(self) -> bool:
        """True if the rest of the payload, or 16 KiB of it, has arrived."""
        arrived = len(self.connection.unread) + readable_bytes(self.descriptor)
        return arrived >= min(self.connection.payload_missing, _SENT_AHEAD_BYTES)

    def to_json(self) -> dict[str, object]:
        process = self.connection.peer.process if self.connection.peer else ""
        return {"user": self.user_id, "pid": self.process_id, "process": process, "bytes": self.received_bytes}


class Connections:
    """Open connections and the listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        poller: select.epoll,
        routes: Routes,
        unfinished: UnfinishedRequests,
        execute: Callable[[Command, int], bytes],
        *,
        limits: ConnectionLimits,
        idle_timeout: float,
        spool_directory: Path,  # on the file system of the segments
    ) -> None:
        self._listener = listener
        self._poller = poller
        self._routes = routes
        self._unfinished = unfinished
        self._spool_directory = spool_directory
        self._execute = execute
        self._limits = limits
        self._idle_timeout = idle_timeout
        self._open: dict[int, Client] = {}
        self.descriptors = self._open.keys()  # a live view
        self._waiting: dict[Wait, dict[int, Client]] = {}  # without clients that have unsent replies
        self._wanted_room: dict[int, int] = {}  # of clients that have sent ahead
        self._to_answer: list[Client] = []
        self._held_clients: dict[int, Client] = {}  # clients with records in the refused round
        self._unsent_bytes = 0
        self._round = 0
        self._received = Counter[int]()  # bytes of closed connections, by user id
        self._is_behind = False  # the last round did not serve all ready connections
        self._commands_run = 0
        self._last_command: dict[int, int] = {}  # number of each user's last command
        self._next_command_at = 0.0  # while records arrive
        self._has_new_records = False  # since the last command
        self._is_accepting = True
        poller.register(listener, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def listener_descriptor(self) -> int:
        return self._listener.fileno()

    @property
    def listener_name(self) -> str:
        return str(self._listener.getsockname())

    @property
    def wanted_bytes(self) -> int | None:
        """Least disk room that lets a waiting request continue."""
        return min(self._wanted_room.values(), default=None)

    @property
    def held_requests(self) -> int:
        """Number of requests that wait only for disk space."""
        return len(self._wanted_room) + len(self._held_clients)

    @property
    def wants_room(self) -> bool:
        """True if a request waits for room, even if only its line has arrived."""
        return any(wait.reason is Reason.ROOM for wait in self._waiting)

    @property
    def needs_sweep(self) -> bool:
        return bool(self._open) or not self._is_accepting

    def due_at(self) -> float | None:
        """Return the monotonic time at which a waiting connection can be served."""
        if NEXT_ROUND in self._waiting or OVERDUE in self._waiting:
            return 0.0
        return (self._next_command_at if self._has_new_records else 0.0) if COMMAND in self._waiting else None

    @property
    def received(self) -> dict[int, int]:
        """Bytes received since the start, by user id."""
        total = self._received.copy()
        for client in self._open.values():
            total[client.user_id] += client.received_bytes
        return total

    def largest_senders(self) -> list[dict[str, object]]:
        ordered = sorted(self._open.values(), key=lambda client: client.received_bytes, reverse=True)
        return [client.to_json() for client in ordered[:_SENDERS_SHOWN]]

    # Opening and closing.

    def accept(self, now: float) -> None:
        for _ in range(_ACCEPTED_MAX):
            try:
                client_socket, _ = self._listener.accept()
            except OSError as error:
                # Nothing is pending, or no descriptor is free and the backlog waits for the next sweep.
                self._watch_listener(error.errno not in (errno.EMFILE, errno.ENFILE))
                return
            self._admit(client_socket, now)

    def replace_listener(self, listener: socket.socket, now: float) -> None:
        self.accept(now)
        self._poller.unregister(self._listener)
        self._listener.close()
        self._listener, self._is_accepting = listener, True
        self._poller.register(listener, select.EPOLLIN)

    def close(self) -> None:
        for client in list(self._open.values()):
            self._close(client)
        self._listener.close()

    def expire(self, now: float, timeout: float) -> None:
        """Close clients that stall in a request or do not read; end long waits for busy routes."""
        for client in [each for each in self._open.values() if now - each.active_at > timeout]:
            connection = client.connection
            if connection.wait is HELD:
                continue
            if connection.is_closing or client.unsent:
                self._close(client)
            elif connection.time_out():
                self._update_polling(client)
            elif connection.wait is None and connection.is_inside_request:
                message = f"the rest of the request did not arrive within {timeout:g} s"
                self._send(client, encode_err(Code.TIMEOUT, message))
                self._close(client)
        for wait, waiting in self._waiting.items():  # more of a payload may have arrived
            for client in waiting.values():
                self._update_wanted_room(client, wait)
        self._watch_listener(True)

    def _admit(self, client_socket: socket.socket, now: float) -> None:
        client_socket.setblocking(False)
        process_id, user_id, _ = peer_of(client_socket)
        refusal = self._limits.check(user_id, client_socket.fileno())
        if refusal is not None and self._free_slot(user_id, refusal.user_id, now):
            refusal = self._limits.check(user_id, client_socket.fileno())
        if refusal is not None:
            self._limits.report(user_id, refusal.message)
            with contextlib.suppress(OSError):
                client_socket.send(encode_err(Code.BUSY, refusal.message))
            client_socket.close()
            return
        self._limits.add(user_id)
        connection = Connection(
            user_id, lambda: Peer(user_id, process_id, process_name(process_id)), self._routes, self._unfinished
        )
        client = Client(client_socket, client_socket.fileno(), user_id, process_id, connection, now)
        self._open[client.descriptor] = client
        self._poller.register(client_socket, client.events)

    def _free_slot(self, user_id: int, only_user: int | None, now: float) -> bool:
        """Close a connection to admit a new one; return False if none may be closed."""
        idle_since = now - self._idle_timeout
        client = _find_replaceable(
            self._open.values(), self._limits.count, user_id, only_user=only_user, idle_since=idle_since
        )
        if client is None:
            return False
        self._send(client, encode_err(Code.TIMEOUT, "closed while idle to free a slot"))
        self._close(client)
        return True

    def _close(self, client: Client) -> None:
        if client.socket.fileno() < 0:
            return
        client.connection.close()
        close_files(self._unfinished.discarded)
        self._received[client.user_id] += client.received_bytes
        self._index_wait(client, None)
        del self._open[client.descriptor]
        self._held_clients.pop(client.descriptor, None)  # its records stay in the round
        self._poller.unregister(client.socket)
        self._unsent_bytes -= len(client.unsent)
        client.unsent = b""
        self._limits.remove(client.user_id)
        client.socket.close()
        self._watch_listener(True)

    def _watch_listener(self, is_accepting: bool) -> None:
        if is_accepting != self._is_accepting and self._listener.fileno() >= 0:
            self._is_accepting = is_accepting
            self._poller.modify(self._listener, select.EPOLLIN if is_accepting else 0)

    # Requests.

    def collect(self, readable: list[int], commit_round: CommitRound, backpressure: Backpressure, now: float) -> None:
        """Serve readable connections, and those whose wait has ended."""
        arena = commit_round.arena
        self._round += 1
        # Keyed by descriptor: a waiting connection whose client is gone is handled once.
        ready = {descriptor: self._open[descriptor] for descriptor in readable if descriptor in self._open}
        promised = self._unfinished.promised_to_others
        ended_waits = [wait for wait in self._waiting if not backpressure.must_keep_waiting(wait, promised)]
        for each in ended_waits:
            ready |= self._waiting[each]
        arena_limit = arena.used + arena.free - RECEIVE_BYTES
        deadline = time.monotonic() + _ROUND_SECONDS
        clients = _fair_order(ready.values()) if self._is_behind else ready.values()
        self._is_behind = False
        for client in clients:
            if arena.used > arena_limit or time.monotonic() > deadline:
                self._is_behind = True
                return
            wait = client.connection.wait
            if wait is None or wait in ended_waits:
                self._receive(client, commit_round, backpressure, now)
            elif wait is not COMMAND:
                self._close(client)  # only a hangup was polled for: the client is gone

    def _receive(self, client: Client, commit_round: CommitRound, backpressure: Backpressure, now: float) -> None:
        connection, arena = client.connection, commit_round.arena
        start, length = arena.used, 0
        if connection.unread:
            start += len(connection.unread)
            if arena.free < RECEIVE_BYTES + len(connection.unread):
                return  # the next round has an empty arena
            arena.view[arena.used : start] = connection.unread
        if connection.wait is not None:
            client.active_at = now  # the client could not send more while it waited
        else:
            receive_limit = min(connection.receive_bytes, self._unfinished.receive_max_bytes)
            try:
                length = client.socket.recv_into(arena.view[start : start + receive_limit])
            except BlockingIOError:
                return
            except OSError:
                pass
            if length == 0:
                connection.is_closing = True  # after unsent replies
                self._send(client, b"")
                return
        was_inside_request = connection.is_inside_request
        client.served_round = self._round
        arena.filled = start + length
        connection.receive(commit_round, backpressure)
        if connection.spooling is not None or self._unfinished.discarded:
            self._spool(connection, commit_round, backpressure)
        client.received_bytes += length
        client.slow_bytes += length
        if connection.answers or connection.command or client.slow_bytes >= RECEIVE_BYTES:
            client.is_proven, was_inside_request = True, False
        if not was_inside_request:
            client.active_at, client.slow_bytes = now, 0
        if connection.wait is not None or client.indexed_wait is not None:
            self._update_polling(client)
        if connection.answers:
            self._to_answer.append(client)

    def _spool(self, connection: Connection, commit_round: CommitRound, backpressure: Backpressure) -> None:
        """Write a connection's parts, and let it continue."""
        while (spooling := connection.spooling) is not None and spooling.unwritten is not None:
            try:
                write_part(spooling, self._spool_directory, self._limits.leaves_enough)
            except ProtocolError as error:
                connection.refuse_payload(error)
            connection.receive(commit_round, backpressure)
        close_files(self._unfinished.discarded)

    def run_command(self, now: float, *, is_held: bool = False) -> None:
        """Run a command of the least recently served user; that user's identical commands share the reply.

        If ``is_held``, a round waits for the disk: refuse commands that need it.
        """
        if self._has_new_records and now < self._next_command_at:
            return
        waiting = list(self._waiting.get(COMMAND, {}).values())
        if not waiting:
            return
        chosen = min(waiting, key=lambda client: self._last_command.get(client.user_id, 0))
        user_id, command = chosen.user_id, chosen.connection.command
        assert command is not None
        self._commands_run += 1
        self._last_command[user_id] = self._commands_run
        start = time.monotonic()
        is_refused = is_held and command.verb not in _DISKLESS
        reply = _DISK_REFUSES if is_refused else self._execute(command, user_id)
        end = time.monotonic()
        self._next_command_at = end + min(4 * (end - start), _COMMAND_PAUSE_MAX_SECONDS)
        self._has_new_records = False
        identical = [each for each in waiting if each.user_id == user_id and each.connection.command == command]
        for client in identical[:_SHARED_REPLIES_MAX]:
            if client.socket.fileno() < 0:  # closed for lack of memory
                continue
            client.connection.end_command()
            client.active_at = now
            self._send(client, reply)

    # Replies.

    def flush(self, descriptor: int, now: float) -> None:
        client = self._open[descriptor]
        client.active_at = now
        self._send(client, b"")

    def reply(self, commit_round: CommitRound, refusal: bytes = b"") -> None:
        """Answer the round's requests; a ``refusal`` replaces the replies to records."""
        self._has_new_records = self._has_new_records or commit_round.committed > 0
        answering = [*self._held_clients.values(), *self._to_answer]
        self._held_clients, self._to_answer = {}, []
        for client in answering:
            self._send(client, client.connection.reply(self._execute, refusal))
        close_files(self._unfinished.complete)

    def hold_clients(self) -> None:
        """Stop reading from connections with records in the refused round; answer the others."""
        for client in self._to_answer:
            if client.socket.fileno() >= 0 and client.connection.hold():
                self._held_clients[client.descriptor] = client
                self._update_polling(client)
        self.answer_others()

    def answer_others(self) -> None:
        """Reply to clients without records in the held round."""
        answering, self._to_answer = self._to_answer, []
        for client in answering:
            if client.socket.fileno() >= 0 and client.connection.wait is not HELD:
                self._send(client, client.connection.reply(self._execute))

    def _send(self, client: Client, data: bytes | memoryview) -> None:
        """Send unsent replies and ``data``; then poll for the next event, or close a finished connection."""
        if client.unsent:
            data = b"".join((client.unsent, data)) if data else client.unsent
        connection = client.connection
        try:
            sent = client.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the client is gone; its records are in the log
            self._close(client)
            return
        if sent == len(data) and not (client.unsent or client.indexed_wait or connection.wait or connection.is_closing):
            return  # the usual case
        unsent = memoryview(data)[sent:] if sent < len(data) else b""  # many clients may share a reply
        self._unsent_bytes += len(unsent) - len(client.unsent)
        client.unsent = unsent
        self._update_polling(client)
        if connection.is_closing and not unsent:
            self._close(client)
        while self._unsent_bytes > _UNSENT_TOTAL_MAX_BYTES:
            slowest = min((each for each in self._open.values() if each.unsent), key=lambda each: each.active_at)
            self._limits.report(slowest.user_id, "unread replies used up the memory limit")
            self._close(slowest)

    # Waiting.

    def _update_polling(self, client: Client) -> None:
        """Index a client by its wait, and poll for its next event; unsent replies come first."""
        if client.socket.fileno() < 0:
            return
        wait = client.connection.wait
        self._index_wait(client, None if client.unsent else wait)
        events = (
            select.EPOLLOUT if client.unsent else select.EPOLLIN if wait is None else 0
        )  # epoll still reports a hangup
        if events != client.events:
            client.events = events
            self._poller.modify(client.socket, events)

    def _index_wait(self, client: Client, wait: Wait | None) -> None:
        descriptor, previous = client.descriptor, client.indexed_wait
        if previous is not None:
            del self._waiting[previous][descriptor]
            self._wanted_room.pop(descriptor, None)
            if not self._waiting[previous]:
                del self._waiting[previous]
        client.indexed_wait = wait
        if wait is not None:
            self._waiting.setdefault(wait, {})[descriptor] = client
            self._update_wanted_room(client, wait)

    def _update_wanted_room(self, client: Client, wait: Wait) -> None:
        if wait.reason is Reason.ROOM and client.has_sent_ahead:
            self._wanted_room[client.descriptor] = wait.room_bytes


def write_part(spooling: Spooling, directory: Path, leaves_enough: Callable[[int], bool]) -> None:
    """Write the accepted part to an unnamed file, or raise ProtocolError."""
    part, spooling.unwritten = spooling.unwritten, None
    try:
        if (file := spooling.file) is None:
            file = spooling.file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (closed later)
            if not leaves_enough(file.fileno()):
                raise ProtocolError(Code.FAILED, "too few file descriptors are left")
        while part:
            part = part[file.write(part) :]
        if spooling.request.columns and not spooling.missing_bytes:
            spooling.columns = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except OSError as error:
        raise ProtocolError(Code.FULL if error.errno in DISK_FULL else Code.FAILED, str(error)) from error


def close_files(spoolings: list[Spooling]) -> None:
    for spooling in spoolings:
        if spooling.file is not None:
            spooling.file.close()
    spoolings.clear()


def _is_readable(connection: socket.socket) -> bool:
    """Return True if bytes have arrived, or the client is gone."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _fair_order(ready: Iterable[Client]) -> Iterable[Client]:
    """Alternate between users; a user's least recently served connections come first."""
    by_user: dict[int, list[Client]] = {}
    for client in sorted(ready, key=lambda each: each.served_round):
        by_user.setdefault(client.user_id, []).append(client)
    if len(by_user) <= 1:
        return chain.from_iterable(by_user.values())
    return (client for row in zip_longest(*by_user.values()) for client in row if client is not None)


def _find_replaceable(
    clients: Iterable[Client],
    counts: Mapping[int, int],
    newcomer: int,
    *,
    only_user: int | None,
    idle_since: float,
) -> Client | None:
    """Return the connection to close for a new one of user ``newcomer``.

    Clients that have sent no complete request or do not read come first, from the user with most connections; users
    with fewer than the newcomer are spared. Clients idle since ``idle_since`` come next.
    """
    candidates = [each for each in clients if only_user in (None, each.user_id)]
    unsettled = [
        each
        for each in candidates
        if (each.unsent or not each.is_proven) and counts[each.user_id] >= counts.get(newcomer, 0)
    ]
    unsettled.sort(key=lambda each: (-counts[each.user_id], each.active_at))
    idle = sorted((each for each in candidates if each.active_at <= idle_since), key=lambda each: each.active_at)
    return next((each for each in chain(unsettled, idle) if each.is_replaceable), None)
