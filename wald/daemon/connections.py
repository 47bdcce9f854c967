"""Open connections of the socket, and the order in which they are served.

Which connection is served first, and which makes way for a newcomer: no user gets more by opening more of them.

The connections of the unix socket: accepting them, reading from them, answering in order, closing them.

What becomes of the requests is decided in ``connection``. A request that cannot be taken now (its route is
inside a pipe's long line, or the disk is nearly full) makes its connection wait: nothing more is read from it until the
cause is gone. A route may stay busy for ever, so that is waited for only as long as for the rest of a half-sent
request; for the disk there is no limit.
A command that takes longer than a record is carried out after records are answered, one a turn, and leaves them time:
users take turns, and so do their connections. A command is answered only after its connection has read the last answer.
A turn takes so many requests and goes on with the others in the next, in the order that fairness asks for.
A connection that holds nothing may stay for ever, until its place is needed. One that does not read its replies, or of
which hardly anything comes inside a request, is closed after the time for a half-sent request.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, zip_longest

from wald.daemon.backpressure import Backpressure, Cause, Wait
from wald.daemon.committer import Arena, CommitRound, Ticket
from wald.daemon.connection import RECEIVE_BYTES, Connection, Requests, ok
from wald.daemon.listening import ConnectionLimits, peer_of
from wald.format.protocol import Code, Command, RequestReader, encode_err


def in_turn(ready: Iterable[Connection]) -> Iterable[Connection]:
    """One connection of each user, then a second one of each; of a user's, the one first that was served longest ago.

    A turn that cannot serve all of them goes on in the next turn with those that it has left out.
    """
    by_user: dict[int, list[Connection]] = {}
    for connection in sorted(ready, key=lambda each: each.served):
        by_user.setdefault(connection.user_id, []).append(connection)
    if len(by_user) <= 1:
        return chain.from_iterable(by_user.values())
    return (each for row in zip_longest(*by_user.values()) for each in row if each is not None)


def makes_way(
    connections: Iterable[Connection],
    counts: Mapping[int, int],
    newcomer: int,
    *,
    only_user: int | None,
    quiet_since: float,
) -> Connection | None:
    """The connection whose place a new one of the user ``newcomer`` gets; None: no connection has to make way.

    First come those that have sent no whole request yet or do not read their replies, at once, from the user that has
    the most connections, if the newcomer's user has no more than that one; then those that are idle for long.

    Args:
        counts: how many connections each user has.
        only_user: whose connection it has to be; None: any user's.
        quiet_since: a connection that has been idle since then has been so for long.
    """
    candidates = [each for each in connections if only_user in (None, each.user_id)]
    hasty = [each for each in candidates if not each.is_settled and counts[each.user_id] >= counts.get(newcomer, 0)]
    idle = [each for each in candidates if each.active_at <= quiet_since]
    by_user = sorted(hasty, key=lambda each: (-counts[each.user_id], each.active_at))
    return next(_yielding(chain(by_user, sorted(idle, key=lambda each: each.active_at))), None)


def _yielding(connections: Iterable[Connection]) -> Iterator[Connection]:
    return (each for each in connections if each.may_yield)


UNSENT_TOTAL_MAX_BYTES = 8 << 20  # of replies; beyond it the connection that has not read for longest is closed
PAUSE_MAX_SECONDS = 0.1  # between two commands, while records come
TURN_SECONDS = 0.002  # some syncs: a flood of requests does not hold up those of others for longer
ACCEPTED_MAX = 32  # in one turn; a newcomer waits behind all those that came before it
SENDERS_SHOWN = 5
NEED_NO_DISK = frozenset({"PING", "HEAD", "STAT"})
_DISK_REFUSES = encode_err(Code.FULL, "disk write failed; see STAT for the cause")
SAME_ANSWERS_MAX = 16  # to connections of one user that all sent the same command


class Connections:
    """All open connections.

    Args:
        requests: takes what is received.
        answer: carries out a user's command and returns the reply.

    Attributes:
        received: how many bytes have come of each user.
    """

    def __init__(
        self,
        listener: socket.socket,
        poller: select.epoll,
        requests: Requests,
        answer: Callable[[Command, int], bytes],
        *,
        admission: ConnectionLimits,
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
        self._held: dict[int, int] = {}  # of those that wait for room and not for their peers: how much
        self._answering: list[Connection] = []
        self._aside: dict[int, Connection] = {}  # with records in a turn that the disk refuses
        self._unsent_bytes = 0
        self._turns = 0
        self.received: dict[int, int] = {}
        self._left_out = False  # whether the last turn had no room for some that were ready
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
        """The least room on the disk that a held request waits for; None if no request is held."""
        return min(self._held.values(), default=None)

    @property
    def held_requests(self) -> int:
        """How many requests wait for room on the disk that their senders have sent, or would go on to send."""
        return len(self._held) + len(self._aside)

    def largest_senders(self) -> list[dict[str, object]]:
        """The open connections of which most has come, as STAT reports them."""
        ordered = sorted(self._open.values(), key=lambda each: each.received_bytes, reverse=True)
        return [each.as_sender() for each in ordered[:SENDERS_SHOWN]]

    @property
    def wants_room(self) -> bool:
        """Whether a request waits for room on the disk, if only its line has come."""
        return any(isinstance(cause, int) for cause in self._waiting)

    def due(self) -> float | None:
        """When a request that was received can be taken, on the monotonic clock; None: there is none."""
        if Wait.TURN in self._waiting or Wait.REFUSAL in self._waiting:
            return 0.0
        return (self._carry_out_at if self._recorded else 0.0) if Wait.COMMAND in self._waiting else None

    @property
    def needs_sweep(self) -> bool:
        """Whether :meth:`expire` may have something to do."""
        return bool(self._open) or not self._listening

    def accept(self, now: float) -> None:
        """Accept connections, or refuse them where there is no place; without a descriptor all wait in the queue."""
        for _ in range(ACCEPTED_MAX):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                # None is left; or no descriptor is, and none is accepted before the next sweep.
                self._watch_listener(error.errno not in (errno.EMFILE, errno.ENFILE))
                return
            self._admit(accepted, now)

    def listen_on(self, listener: socket.socket, now: float) -> None:
        """Accept the connections of another socket, after those pending on the previous one."""
        self.accept(now)
        self._poller.unregister(self._listener)
        self._listener.close()
        self._listener, self._listening = listener, True
        self._poller.register(listener, select.EPOLLIN)

    def _admit(self, accepted: socket.socket, now: float) -> None:
        accepted.setblocking(False)
        process_id, user_id, _ = peer_of(accepted)
        refusal = self._admission.check(user_id, accepted.fileno())
        if refusal is not None and self._make_place(user_id, refusal.user_id, now):
            refusal = self._admission.check(user_id, accepted.fileno())
        if refusal is not None:
            self._admission.report(user_id, refusal.message)
            with contextlib.suppress(OSError):
                accepted.send(encode_err(Code.BUSY, refusal.message))
            accepted.close()
            return
        self._admission.add(user_id)
        reader = RequestReader(self._request_max_bytes)
        self._open[accepted.fileno()] = Connection(accepted, user_id, process_id, now, reader)
        self._poller.register(accepted, select.EPOLLIN)

    def flush(self, descriptor: int, now: float) -> None:
        """Send replies that did not fit before."""
        connection = self._open[descriptor]
        connection.active_at = now
        self._send(connection, b"")

    def collect(self, readable: list[int], turn: CommitRound, arena: Arena, gate: Backpressure, now: float) -> None:
        """Take what connections have sent, and what had to wait and need not any more, as far as a turn goes."""
        self._turns += 1
        # By descriptor: a connection that waited, and whose peer has gone, is handled once in a turn.
        ready = {each: self._open[each] for each in readable if each in self._open}  # others had to make way
        gone = [cause for cause in self._waiting if not gate.holds(cause, self._requests.promised_before)]
        for cause in gone:
            ready |= self._waiting[cause]
        enough_at = time.monotonic() + TURN_SECONDS
        ordered, self._left_out = in_turn(ready.values()) if self._left_out else ready.values(), False
        for connection in ordered:
            if arena.free < RECEIVE_BYTES or time.monotonic() > enough_at:
                self._left_out = True
                return
            if connection.waits_for is None:
                self._receive(connection, turn, arena, gate, now)
            elif connection.waits_for not in gone:
                self._hung_up(connection)
            else:
                self._resume(connection, turn, arena, gate, now)

    def _receive(self, connection: Connection, turn: CommitRound, arena: Arena, gate: Backpressure, now: float) -> None:
        """Read from one connection and take its requests."""
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
        self._take(connection, turn, arena, gate, start, length, now)

    def _resume(self, connection: Connection, turn: CommitRound, arena: Arena, gate: Backpressure, now: float) -> None:
        """Take the requests of one connection that had to wait."""
        if (start := _begin(connection, arena)) is None:
            return
        opened = replace(gate, overdue=connection.waits_for is Wait.REFUSAL)
        connection.active_at = now  # the rest of a half-sent request could not come before
        self._wait(connection, None)
        self._take(connection, turn, arena, opened, start, 0, now)

    def _hung_up(self, connection: Connection) -> None:
        """Something happened although no input was asked for: the peer is gone."""
        if connection.waits_for is not Wait.COMMAND:
            self._close(connection)

    def carry_out(self, now: float, *, held: bool = False) -> None:
        """Carry out one of the commands that wait, of a connection that has read its last answer.

        The same command of the same user is answered with it. While records come, this gets a fifth of the time.

        Args:
            held: the disk refuses a turn, so commands that need the disk are rejected.
        """
        if self._recorded and now < self._carry_out_at:
            return
        waiting = list(self._waiting.get(Wait.COMMAND, {}).values())
        if not waiting:
            return
        # The user that has waited longest comes first.
        first = min(waiting, key=lambda each: self._served.get(each.user_id, 0))
        user_id, command = first.user_id, first.command
        assert command is not None
        self._carried_out += 1
        self._served[user_id] = self._carried_out
        started = time.monotonic()
        refused = held and command.verb not in NEED_NO_DISK
        answer = _DISK_REFUSES if refused else self._answer_to(command, user_id)
        ended = time.monotonic()
        self._carry_out_at, self._recorded = ended + min(4 * (ended - started), PAUSE_MAX_SECONDS), False
        same = [each for each in waiting if each.user_id == user_id and each.command == command]
        for connection in same[:SAME_ANSWERS_MAX]:
            if connection.socket.fileno() < 0:  # it had to make way for the others' answers
                continue
            connection.command, connection.active_at = None, now
            self._wait(connection, Wait.TURN if connection.reader.leftover else None)
            self._send(connection, answer)

    def reply(self, turn: CommitRound) -> None:
        """After the commit: send each connection the sequences of its records."""
        self._recorded = self._recorded or bool(turn.drafts)
        self._answer(lambda ticket: ok(*ticket.sequences()))

    def refuse(self, code: Code, message: str) -> None:
        """The turn could not be committed: refuse all records that were in it."""
        refusal = encode_err(code, message)
        self._answer(lambda _: refusal)

    def set_aside(self) -> None:
        """Stop reading from the connections that have records in the turn that the disk refuses."""
        self._answering = [each for each in self._answering if each.socket.fileno() >= 0]
        for connection in self._answering:
            if any(isinstance(answer, Ticket) for answer in connection.answers):
                self._aside[connection.socket.fileno()] = connection
                self._wait(connection, Wait.DISK)
        self.answer_others()

    def answer_others(self) -> None:
        """Answer the connections without records in the held turn."""
        answering, self._answering = self._answering, []
        self._redeem([each for each in answering if each.waits_for is not Wait.DISK], lambda _: b"")

    def _answer(self, redeem: Callable[[Ticket], bytes]) -> None:
        aside, self._aside = list(self._aside.values()), {}
        for connection in aside:
            self._wait(connection, Wait.COMMAND if connection.command else Wait.TURN)
        answering, self._answering = aside + self._answering, []
        self._redeem(answering, redeem)
        self._requests.end_turn()

    def _redeem(self, answering: list[Connection], redeem: Callable[[Ticket], bytes]) -> None:
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

    def expire(self, now: float, timeout: float) -> None:
        """Close the connections whose half-sent request stands still or whose replies are not read.

        Requests whose route stays busy are refused, and connections are accepted again if none could be.
        """
        for connection in [each for each in self._open.values() if now - each.active_at > timeout]:
            if connection.waits_for is Wait.DISK:
                continue
            if connection.closing or connection.unsent:
                self._close(connection)
            elif isinstance(connection.waits_for, str):
                self._wait(connection, Wait.REFUSAL)
            elif connection.unfinished:
                self._send(connection, encode_err(Code.TIMEOUT, f"nothing more of the request came in {timeout:g} s"))
                self._close(connection)
        for cause, waiting in self._waiting.items():  # more may have come since they began to wait
            self._note_held(cause, waiting)
        self._watch_listener(True)

    def close(self) -> None:
        """Close the socket and every connection."""
        for connection in list(self._open.values()):
            self._close(connection)
        self._listener.close()

    def _make_place(self, newcomer: int, only_user: int | None, now: float) -> bool:
        """Close the connection that makes way for one of the user ``newcomer``; False if none does."""
        connection = makes_way(
            self._open.values(),
            self._admission.count,
            newcomer,
            only_user=only_user,
            quiet_since=now - self._idle_timeout,
        )
        if connection is None:
            return False
        self._send(connection, encode_err(Code.TIMEOUT, "nothing was under way, and the place was needed"))
        self._close(connection)
        return True

    def _take(
        self,
        connection: Connection,
        turn: CommitRound,
        arena: Arena,
        gate: Backpressure,
        start: int,
        length: int,
        now: float,
    ) -> None:
        """Take the requests in the arena: what the connection's reader kept, and from ``start`` on what has come."""
        begun, connection.served = connection.is_inside_request, self._turns
        cause = self._requests.take(connection, turn, arena, gate, start + length)
        self.received[connection.user_id] = self.received.get(connection.user_id, 0) + length
        connection.has_sent(length, now, begun=begun, whole=bool(connection.answers or connection.command))
        if cause is not None:
            self._wait(connection, cause)
        if connection.answers:
            self._answering.append(connection)

    def _send(self, connection: Connection, data: bytes | memoryview) -> None:
        if connection.unsent:
            data = b"".join((connection.unsent, data)) if data else connection.unsent
        try:
            sent = connection.socket.send(data) if data else 0
            if sent == len(data) and not (connection.unsent or connection.closing) and connection.waits_for is None:
                return  # as nearly always: nothing else has changed
        except BlockingIOError:
            sent = 0
        except OSError:  # the peer is gone; what the reply says is in the log all the same
            self._close(connection)
            return
        before = connection.wanted_events
        unsent = memoryview(data)[sent:] if sent < len(data) else b""  # one answer may be shared by many
        self._unsent_bytes += len(unsent) - len(connection.unsent)
        self._file(connection, connection.waits_for, unsent)
        self._watch(connection, before)
        if connection.closing and not unsent:
            self._close(connection)
        while self._unsent_bytes > UNSENT_TOTAL_MAX_BYTES:
            slowest = min((each for each in self._open.values() if each.unsent), key=lambda each: each.active_at)
            self._admission.report(slowest.user_id, "replies that are not read fill the memory")
            self._close(slowest)

    def _wait(self, connection: Connection, cause: Cause | None) -> None:
        """Read nothing more from a connection for this cause; None: read again."""
        before = connection.wanted_events
        self._file(connection, cause, connection.unsent)
        self._watch(connection, before)

    def _file(self, connection: Connection, cause: Cause | None, unsent: bytes | memoryview) -> None:
        """Note what a connection waits for; one whose peer does not read its replies waits for that alone."""
        descriptor, before = connection.socket.fileno(), connection.waits_for
        if before is not None and not connection.unsent:
            del self._waiting[before][descriptor]
            self._held.pop(descriptor, None)
            if not self._waiting[before]:
                del self._waiting[before]
        connection.waits_for, connection.unsent = cause, unsent
        if cause is not None and not unsent:
            self._waiting.setdefault(cause, {})[descriptor] = connection
            self._note_held(cause, {descriptor: connection})

    def _note_held(self, cause: Cause, waiting: dict[int, Connection]) -> None:
        if isinstance(cause, int):
            self._held |= {descriptor: cause for descriptor, each in waiting.items() if each.has_sent_ahead}

    def _watch(self, connection: Connection, before: int) -> None:
        if connection.wanted_events != before:
            self._poller.modify(connection.socket, connection.wanted_events)

    def _close(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if descriptor < 0:
            return
        self._wait(connection, None)
        del self._open[descriptor]
        self._aside.pop(descriptor, None)  # its records stay in the turn
        self._poller.unregister(connection.socket)
        self._requests.forget(connection)
        self._unsent_bytes -= len(connection.unsent)
        connection.unsent = b""
        self._admission.remove(connection.user_id)
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
    kept = connection.reader.leftover
    if arena.free < RECEIVE_BYTES + len(kept):
        return None
    start = arena.used + len(kept)
    if kept:
        arena.view[arena.used : start] = kept
    return start
