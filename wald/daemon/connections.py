"""The connections of the unix socket: accepting them, reading from them, answering in order, closing them.

What becomes of the requests is decided in :mod:`wald.daemon.requests`. A request that cannot be taken now (its route is
inside a pipe's long line, or the disk is nearly full) makes its connection wait: nothing more is read from it until the
cause is gone. A route may stay busy for ever, so that is waited for only as long as for the rest of a half-sent
request; for the disk there is no limit.
A command that takes longer than a record is carried out after records are answered, one a turn, and leaves them time:
users take turns, and so do their connections. A command is answered only after its connection has read the last answer.
A connection that holds nothing may stay for ever, until its place is needed: then the one that has been idle for
longest, and for ``idle_timeout``, is closed.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace

from wald.daemon.connection import RECEIVE_BYTES, Connection
from wald.daemon.gate import Cause, Gate, Wait
from wald.daemon.listening import Admission
from wald.daemon.requests import Requests, ok
from wald.daemon.turn import Arena, Ticket, Turn
from wald.format.protocol import Code, Command, RequestReader, encode_err

UNSENT_TOTAL_MAX_BYTES = 16 << 20  # of replies; beyond it the connection that has not read for longest is closed
PAUSE_MAX_SECONDS = 0.1  # between two commands, while records come
SAME_ANSWERS_MAX = 16  # to connections of one user that all sent the same command
_PEER = struct.Struct("iII")  # SO_PEERCRED: process, user, group


class Connections:
    """All open connections.

    Args:
        requests: takes what is received.
        answer: carries out a user's command and returns the reply.
    """

    def __init__(
        self,
        listener: socket.socket,
        poller: select.epoll,
        requests: Requests,
        answer: Callable[[Command, int], bytes],
        *,
        admission: Admission,
        request_max_bytes: int,
        idle_timeout: float,
    ) -> None:
        self._listener = listener
        self._poller = poller
        self._requests = requests
        self._answer_to = answer
        self._request_max_bytes = request_max_bytes
        self._admission = admission
        self._idle_timeout = idle_timeout
        self._open: dict[int, Connection] = {}
        self._waiting: dict[Cause, dict[int, Connection]] = {}  # none is tried again before its cause is gone
        self._answering: list[Connection] = []
        self._unsent_bytes = 0
        self._served: dict[int, int] = {}  # user → the number of the last command that was carried out
        self._carried_out = 0
        self._carry_out_at = 0.0  # when the next command is carried out, while records come
        self._recorded = False  # whether some have, since a command was carried out
        self._listening = True
        poller.register(listener, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._open

    @property
    def listener_descriptor(self) -> int:
        """Readable when a connection can be accepted."""
        return self._listener.fileno()

    @property
    def listener_name(self) -> str:
        """The path of the socket."""
        return str(self._listener.getsockname())

    @property
    def wanted_bytes(self) -> int | None:
        """The least room on the disk that a request waits for; None if no request does."""
        return min((cause for cause in self._waiting if isinstance(cause, int)), default=None)

    @property
    def held_requests(self) -> int:
        """How many requests wait for room on the disk."""
        return sum(len(held) for cause, held in self._waiting.items() if isinstance(cause, int))

    def due(self) -> float | None:
        """When a request that was received can be taken, on the monotonic clock; None: there is none."""
        if any(not each.unsent for wait in (Wait.TURN, Wait.REFUSAL) for each in self._waiting.get(wait, {}).values()):
            return 0.0
        asked = any(not each.unsent for each in self._waiting.get(Wait.COMMAND, {}).values())
        return (self._carry_out_at if self._recorded else 0.0) if asked else None

    @property
    def needs_sweep(self) -> bool:
        """Whether :meth:`expire` may have something to do."""
        return bool(self._open) or not self._listening

    def accept(self, now: float) -> None:
        """Accept one connection, or refuse it where there is no place; without a descriptor all wait in the queue."""
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # Gone already; or no descriptor is left, and none is accepted before the next sweep.
            self._watch_listener(error.errno not in (errno.EMFILE, errno.ENFILE))
            return
        accepted.setblocking(False)
        _, user_id, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        refusal = self._admission.judge(user_id, accepted.fileno())
        if refusal is not None and self._make_place(refusal.user_id, now):
            refusal = self._admission.judge(user_id, accepted.fileno())
        if refusal is not None:
            self._admission.refuse(user_id, refusal.message)
            with contextlib.suppress(OSError):
                accepted.send(encode_err(Code.BUSY, refusal.message))
            accepted.close()
            return
        self._admission.enter(user_id)
        self._open[accepted.fileno()] = Connection(accepted, user_id, now, RequestReader(self._request_max_bytes))
        self._poller.register(accepted, select.EPOLLIN)

    def flush(self, descriptor: int, now: float) -> None:
        """Send replies that did not fit before."""
        connection = self._open[descriptor]
        connection.active_at = now
        self._send(connection, b"")

    def receive(self, descriptor: int, turn: Turn, arena: Arena, gate: Gate, now: float) -> None:
        """Read from one connection and take its requests."""
        connection = self._open.get(descriptor)
        if connection is None:  # it had to make way in this very turn
            return
        if connection.waits_for is not None:  # no input was asked for, so the peer is gone
            if connection.waits_for not in (Wait.TURN, Wait.COMMAND):
                self._close(connection)
            return
        if (start := _begin(connection, arena)) is None:
            return  # still readable in the next turn
        most = min(connection.receive_bytes, self._requests.receive_max_bytes)
        try:
            length = connection.socket.recv_into(arena.view[start : start + most])
        except BlockingIOError:
            return
        except OSError:
            length = 0
        if length == 0:
            connection.closing = True  # once the replies it still waits for are sent
            self._send(connection, b"")
            return
        connection.active_at = now
        self._take(connection, turn, arena, gate, start + length)

    def resume(self, turn: Turn, arena: Arena, gate: Gate, now: float) -> None:
        """Take the requests that had to wait and need not any more."""
        gone = [cause for cause in self._waiting if not gate.holds(cause)]
        for connection in [each for cause in gone for each in self._waiting[cause].values() if not each.unsent]:
            if (start := _begin(connection, arena)) is None:
                return
            opened = replace(gate, overdue=connection.waits_for is Wait.REFUSAL)
            connection.active_at = now  # the rest of a half-sent request could not come before
            self._wait(connection, None)
            self._take(connection, turn, arena, opened, start)

    def carry_out(self, now: float) -> None:
        """Carry out one of the commands that wait, of a connection that has read its last answer.

        The same command of the same user is answered with it. While records come, this gets a fifth of the time.
        """
        if self._recorded and now < self._carry_out_at:
            return
        waiting = [each for each in self._waiting.get(Wait.COMMAND, {}).values() if not each.unsent]
        if not waiting:
            return
        # The user that has waited longest comes first.
        first = min(waiting, key=lambda each: self._served.get(each.user_id, 0))
        user_id, command = first.user_id, first.command
        assert command is not None
        self._carried_out += 1
        self._served[user_id] = self._carried_out
        started = time.monotonic()
        answer = self._answer_to(command, user_id)
        ended = time.monotonic()
        self._carry_out_at, self._recorded = ended + min(4 * (ended - started), PAUSE_MAX_SECONDS), False
        same = [each for each in waiting if each.user_id == user_id and each.command == command]
        for connection in same[:SAME_ANSWERS_MAX]:
            if connection.socket.fileno() < 0:  # it had to make way for the others' answers
                continue
            connection.command, connection.active_at = None, now
            self._wait(connection, Wait.TURN if connection.reader.kept else None)
            self._send(connection, answer)

    def reply(self, turn: Turn) -> None:
        """After the commit: send each connection the sequences of its records."""
        self._recorded = self._recorded or bool(turn.drafts)
        self._answer(lambda ticket: ok(*turn.sequences(ticket)))

    def refuse(self, code: Code, message: str) -> None:
        """The turn could not be committed: refuse all records that were in it."""
        refusal = encode_err(code, message)
        self._answer(lambda _: refusal)

    def _answer(self, redeem: Callable[[Ticket], bytes]) -> None:
        answering, self._answering = self._answering, []
        for connection in answering:
            answers, connection.answers = connection.answers, []
            replies = [
                answer
                if isinstance(answer, bytes)
                else redeem(answer)
                if isinstance(answer, Ticket)
                else self._answer_to(answer, connection.user_id)
                for answer in answers
            ]
            self._send(connection, b"".join(replies))
        self._requests.end_turn()

    def expire(self, now: float, timeout: float) -> None:
        """Close the connections whose half-sent request stands still or whose last replies are not read.

        Requests whose route stays busy are refused, and connections are accepted again if none could be.
        """
        for connection in [each for each in self._open.values() if now - each.active_at > timeout]:
            if isinstance(connection.waits_for, str):
                self._wait(connection, Wait.REFUSAL)
            elif connection.closing:
                self._close(connection)
            elif connection.unfinished:
                self._send(connection, encode_err(Code.TIMEOUT, f"nothing more of the request came in {timeout:g} s"))
                self._close(connection)
        self._watch_listener(True)

    def close(self) -> None:
        """Close the socket and every connection."""
        for connection in list(self._open.values()):
            self._close(connection)
        self._listener.close()

    def _make_place(self, user_id: int | None, now: float) -> bool:
        """Close the connection that has been idle, or has read no reply, for longest; False if none has for long.

        Args:
            user_id: of which user; None: of any.
        """
        quiet = [each for each in self._open.values() if now - each.active_at >= self._idle_timeout]
        idle = [each for each in quiet if user_id in (None, each.user_id) and (each.unsent or each.idle)]
        if not idle:
            return False
        connection = min(idle, key=lambda each: each.active_at)
        self._send(connection, encode_err(Code.TIMEOUT, "idle for long, and the place was needed"))
        self._close(connection)
        return True

    def _take(self, connection: Connection, turn: Turn, arena: Arena, gate: Gate, end: int) -> None:
        """Take the requests in the arena's bytes up to ``end``, which begin with what the connection's reader kept."""
        cause = self._requests.take(connection, turn, arena, gate, end)
        if cause is not None:
            self._wait(connection, cause)
        if connection.answers:
            self._answering.append(connection)

    def _send(self, connection: Connection, data: bytes | memoryview) -> None:
        if connection.unsent:
            data = b"".join((connection.unsent, data)) if data else connection.unsent
        before = connection.wanted_events
        try:
            sent = connection.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the peer is gone; what the reply says is in the log all the same
            self._close(connection)
            return
        unsent = memoryview(data)[sent:] if sent < len(data) else b""  # one answer may be shared by many
        self._unsent_bytes += len(unsent) - len(connection.unsent)
        connection.unsent = unsent
        self._watch(connection, before)
        if connection.closing and not unsent:
            self._close(connection)
        while self._unsent_bytes > UNSENT_TOTAL_MAX_BYTES:
            slowest = min((each for each in self._open.values() if each.unsent), key=lambda each: each.active_at)
            self._admission.refuse(slowest.user_id, "replies that are not read fill the memory")
            self._close(slowest)

    def _wait(self, connection: Connection, cause: Cause | None) -> None:
        """Read nothing more from a connection for this cause; None: read again."""
        before, descriptor = connection.wanted_events, connection.socket.fileno()
        if connection.waits_for is not None:
            others = self._waiting[connection.waits_for]
            del others[descriptor]
            if not others:
                del self._waiting[connection.waits_for]
        connection.waits_for = cause
        if cause is not None:
            self._waiting.setdefault(cause, {})[descriptor] = connection
        self._watch(connection, before)

    def _watch(self, connection: Connection, before: int) -> None:
        if connection.wanted_events != before:
            self._poller.modify(connection.socket, connection.wanted_events)

    def _close(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if descriptor < 0:
            return
        self._wait(connection, None)
        del self._open[descriptor]
        self._poller.unregister(connection.socket)
        self._requests.forget(connection)
        self._unsent_bytes -= len(connection.unsent)
        connection.unsent = b""
        self._admission.leave(connection.user_id)
        connection.socket.close()
        self._watch_listener(True)

    def _watch_listener(self, wanted: bool) -> None:
        if wanted != self._listening and self._listener.fileno() >= 0:
            self._listening = wanted
            self._poller.modify(self._listener, select.EPOLLIN if wanted else 0)


def _begin(connection: Connection, arena: Arena) -> int | None:
    """Put what the reader of a connection has kept into the arena; returns where the following bytes go.

    None: the arena has no room for them in this turn.
    """
    kept = connection.reader.kept
    if arena.free < RECEIVE_BYTES + len(kept):
        return None
    start = arena.used + len(kept)
    if kept:
        arena.view[arena.used : start] = kept
    return start
