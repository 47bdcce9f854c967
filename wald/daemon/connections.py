"""The unix socket: connections, their requests, and the replies in order.

A request's payload lies in the turn's arena until it is durable. What is not whole at the end of a turn is kept by its
connection, up to 256 KiB; a larger payload gathers in an unnamed file, so a 40 MB record costs disk, not memory.
A request that cannot be taken now (its route is inside a pipe's long line, or the disk is nearly full) parks its
connection: nothing more is read from it until it can. A route may stay busy for ever, so that is waited for only as
long as for the rest of a half-sent request; for the disk there is no limit.
What takes longer than a record (all but :data:`QUICK`) is carried out one request a turn, after records are answered,
and leaves them time: users take turns, and so do their connections. An answer is made only for who has read the last.
A connection that holds nothing may stay for ever, until its place is needed: then whoever has been idle for longest,
and for ``idle_timeout``, gives it up.
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
from pathlib import Path

from wald.daemon.admission import Admission
from wald.daemon.arena import Arena
from wald.daemon.connection import ASKING_RECEIVE_BYTES, RECEIVE_BYTES, Connection
from wald.daemon.gate import Cause, Gate, Parked, Wait
from wald.daemon.publishing import ok, publish_spooled, publish_whole
from wald.daemon.routes import Routes
from wald.daemon.spooling import Spooling
from wald.daemon.turn import Ticket, Turn
from wald.errors import InvalidInput
from wald.format.protocol import (
    LINE_MAX_BYTES,
    Code,
    Command,
    ProtocolError,
    Publish,
    encode_err,
    parse_request,
)
from wald.store.writing.writer import Route

KEPT_TOTAL_MAX_BYTES = 16 << 20  # of unfinished requests in memory; beyond it even small ones are spooled
UNSENT_TOTAL_MAX_BYTES = 16 << 20  # replies nobody reads; beyond it who has not read for longest is hung up on
QUICK = frozenset({"PING", "HEAD"})
QUICK_MAX = 32  # of one connection in one turn
PAUSE_MAX_SECONDS = 0.1  # between two that take long
SAME_ANSWERS_MAX = 16  # to one user's connections that all ask the same
ANSWERS_MAX = 4096  # to one connection in one turn
_PEER = struct.Struct("iII")  # SO_PEERCRED: process, user, group


class Connections:
    """Everyone who is connected.

    Args:
        answer: carries out a user's request that publishes nothing and returns the reply.
        spool_directory: where large payloads gather; on the file system of the segments.
    """

    def __init__(
        self,
        listener: socket.socket,
        poller: select.epoll,
        routes: Routes,
        answer: Callable[[Command, int], bytes],
        *,
        spool_directory: Path,
        admission: Admission,
        request_max_bytes: int,
        idle_timeout: float,
    ) -> None:
        self._listener = listener
        self._poller = poller
        self._routes = routes
        self._answer_to = answer
        self._spool_directory = spool_directory
        self._request_max_bytes = request_max_bytes
        self._admission = admission
        self._idle_timeout = idle_timeout
        self._open: dict[int, Connection] = {}
        self._waiting: dict[Cause, dict[int, Connection]] = {}  # nobody is looked at before his cause is gone
        self._answering: list[Connection] = []
        self._spooled: list[Spooling] = []
        self._kept_bytes = self._unsent_bytes = 0
        self._served: dict[int, int] = {}  # user → the number of the last request that was carried out
        self._carried_out = 0
        self._carry_out_at = 0.0  # while records come
        self._recorded = False  # whether some have, since a request was carried out
        self._listening = True
        poller.register(listener, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._open

    @property
    def listener_descriptor(self) -> int:
        """Readable when somebody wants to be let in."""
        return self._listener.fileno()

    @property
    def wanted_bytes(self) -> int | None:
        """Room on the disk that a request waits for, the least of all; None if no request does."""
        return min((cause for cause in self._waiting if isinstance(cause, int)), default=None)

    @property
    def held_requests(self) -> int:
        """How many wait for room on the disk."""
        return sum(len(held) for cause, held in self._waiting.items() if isinstance(cause, int))

    def due(self) -> float | None:
        """When a request that is in hand has its turn, on the monotonic clock; None: there is none."""
        if any(not each.unsent for wait in (Wait.TURN, Wait.REFUSAL) for each in self._waiting.get(wait, {}).values()):
            return 0.0
        asked = any(not each.unsent for each in self._waiting.get(Wait.COMMAND, {}).values())
        return (self._carry_out_at if self._recorded else 0.0) if asked else None

    @property
    def needs_sweep(self) -> bool:
        """Whether :meth:`expire` may have something to do."""
        return bool(self._open) or not self._listening

    def accept(self, now: float) -> None:
        """Let one more in, or tell him that there is no place; without a descriptor everybody waits in the queue."""
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # Gone already; or no descriptor is left, and nobody is let in before the next sweep.
            self._listen(error.errno not in (errno.EMFILE, errno.ENFILE))
            return
        accepted.setblocking(False)
        _, user_id, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        why = self._admission.judge(user_id, accepted.fileno())
        if why is not None and self._make_place(why.user_id, now):
            why = self._admission.judge(user_id, accepted.fileno())
        if why is not None:
            self._admission.refuse(user_id, why.words)
            with contextlib.suppress(OSError):
                accepted.send(encode_err(Code.BUSY, why.words))
            accepted.close()
            return
        self._admission.enter(user_id)
        self._open[accepted.fileno()] = Connection(accepted, user_id, now)
        self._poller.register(accepted, select.EPOLLIN)

    def flush(self, descriptor: int, now: float) -> None:
        """Send replies that did not fit before."""
        connection = self._open[descriptor]
        connection.since = now
        self._send(connection, b"")

    def collect(self, descriptor: int, turn: Turn, arena: Arena, gate: Gate, now: float) -> None:
        """Read from one connection and hand whole requests to ``turn``."""
        connection = self._open.get(descriptor)
        if connection is None:  # it had to make way in this very turn
            return
        if connection.waits_for is not None:  # nothing was asked for, so the peer is gone
            if connection.waits_for not in (Wait.TURN, Wait.COMMAND):
                self._close(connection)
            return
        if arena.free < RECEIVE_BYTES + len(connection.kept):
            return  # still readable in the next turn
        start = arena.used + len(connection.kept)
        most = connection.receive_bytes if self._kept_bytes < KEPT_TOTAL_MAX_BYTES else ASKING_RECEIVE_BYTES
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
        connection.since = now
        self._understand(connection, turn, arena, gate, start + length)

    def look_again(self, turn: Turn, arena: Arena, gate: Gate, now: float) -> None:
        """Look at the requests that had to wait for what has come since."""
        freed = [cause for cause in self._waiting if not gate.holds(cause)]
        for connection in [each for cause in freed for each in self._waiting[cause].values() if not each.unsent]:
            if arena.free < RECEIVE_BYTES + len(connection.kept):
                return
            opened = replace(gate, overdue=connection.waits_for is Wait.REFUSAL)
            connection.since = now  # the rest of a half-sent request could not come before
            self._wait(connection, None)
            self._understand(connection, turn, arena, opened, arena.used + len(connection.kept))

    def carry_out(self, now: float) -> None:
        """Carry out one of the requests that wait for that, if the last answer to it was read; the same question of
        the same user is answered with it. While records come, this gets a fifth of the time.
        """
        if self._recorded and now < self._carry_out_at:
            return
        waiting = [each for each in self._waiting.get(Wait.COMMAND, {}).values() if not each.unsent]
        if not waiting:
            return
        first = min(waiting, key=lambda each: self._served.get(each.user_id, 0))  # of those, who has waited longest
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
            connection.command, connection.since = None, now
            self._wait(connection, Wait.TURN if connection.kept else None)
            self._send(connection, answer)

    def reply(self, turn: Turn) -> None:
        """After the commit: tell everyone what became durable."""
        self._recorded = self._recorded or bool(turn.drafts)
        self._answer(lambda ticket: ok(*turn.sequences(ticket)))

    def refuse(self, code: Code, words: str) -> None:
        """The turn could not be committed: say so to everyone whose records were in it."""
        refusal = encode_err(code, words)
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
        for spooling in self._spooled:
            spooling.close()
        self._spooled.clear()

    def expire(self, now: float, timeout: float) -> None:
        """Close the connections whose half-sent request or last replies have been left lying, have those refused whose
        route stays busy, and let others in again if none could be.
        """
        for connection in [each for each in self._open.values() if now - each.since > timeout]:
            if isinstance(connection.waits_for, str):
                self._wait(connection, Wait.REFUSAL)
            elif connection.closing:
                self._close(connection)
            elif connection.unfinished:
                self._send(connection, encode_err(Code.TIMEOUT, f"nothing more of the request came in {timeout:g} s"))
                self._close(connection)
        self._listen(True)

    def close(self) -> None:
        """Close the socket and every connection."""
        for connection in list(self._open.values()):
            self._close(connection)
        self._listener.close()

    def _make_place(self, user_id: int | None, now: float) -> bool:
        """Hang up on who has been idle, or has read no reply, for longest; False if nobody has for long enough.

        Args:
            user_id: whose connection it is; None: anybody's.
        """
        idle = [
            each
            for each in self._open.values()
            if now - each.since >= self._idle_timeout and user_id in (None, each.user_id) and (each.unsent or each.idle)
        ]
        if not idle:
            return False
        connection = min(idle, key=lambda each: each.since)
        self._send(connection, encode_err(Code.TIMEOUT, "idle for long, and the place was needed"))
        self._close(connection)
        return True

    def _understand(self, connection: Connection, turn: Turn, arena: Arena, gate: Gate, end: int) -> None:
        """Take what is whole out of arena bytes that begin with what the connection kept; keep the rest."""
        start = arena.used
        kept = connection.kept
        if kept:
            arena.view[start : start + len(kept)] = kept
        position = self._requests(connection, turn, arena, gate, start, end)
        arena.used = position
        connection.kept = bytes(arena.view[position:end])
        self._kept_bytes += len(connection.kept) - len(kept)
        if connection.answers:
            self._answering.append(connection)

    def _requests(self, connection: Connection, turn: Turn, arena: Arena, gate: Gate, position: int, end: int) -> int:
        """Carry out the requests between ``position`` and ``end``; returns where the first unfinished one begins."""
        commands = 0
        while (position < end or connection.gathered) and not (connection.closing or connection.waits_for is not None):
            if commands == QUICK_MAX or len(connection.answers) >= ANSWERS_MAX:
                self._wait(connection, Wait.TURN)
                break
            if connection.skip_bytes:
                passed = min(connection.skip_bytes, end - position)
                connection.skip_bytes -= passed
                position += passed
                continue
            if connection.gathered:
                self._publish_gathered(connection, turn, gate)
                continue
            if connection.spooling is not None:
                position += self._spool(connection, arena.view[position:end], gate)
                continue
            newline = arena.buffer.find(b"\n", position, min(end, position + LINE_MAX_BYTES))
            if newline < 0:
                if end - position < LINE_MAX_BYTES:
                    break
                connection.answers.append(encode_err(Code.BAD_REQUEST, f"no newline in {LINE_MAX_BYTES} bytes"))
                connection.closing = True
                return end
            body = newline + 1
            try:
                request = parse_request(bytes(arena.view[position:newline]), request_max_bytes=self._request_max_bytes)
                if isinstance(request, Command):
                    position = body
                    connection.receive_bytes = ASKING_RECEIVE_BYTES
                    if request.verb in QUICK:  # answered after the commit of what came before it, as is everything
                        connection.answers.append(request)
                        commands += 1
                    else:
                        connection.command = request
                        self._wait(connection, Wait.COMMAND)
                    continue
                connection.receive_bytes = RECEIVE_BYTES
                route = self._admit(connection, request, gate)
                if body + request.payload_bytes <= end:
                    position = body + request.payload_bytes
                    connection.answers.append(publish_whole(turn, arena, connection.user_id, route, request, body))
                elif self._fits(request):
                    break
                else:
                    connection.spooling = self._open_spool(request, route, gate)
                    position = body
            except Parked as parked:
                self._wait(connection, parked.cause)
            except ProtocolError as error:
                connection.answers.append(encode_err(error.code, error.words))
                connection.closing = error.payload_bytes is None
                connection.skip_bytes = error.payload_bytes or 0
                position = body
        return end if connection.closing else position

    def _admit(self, connection: Connection, request: Publish, gate: Gate) -> Route:
        try:
            route = self._routes.find(request.route, connection.user_id)
            gate.pass_through(route)
        except InvalidInput as error:
            raise ProtocolError(Code.BAD_ROUTE, error.message, payload_bytes=request.payload_bytes) from None
        except ProtocolError as error:
            error.payload_bytes = request.payload_bytes
            raise
        return route

    def _fits(self, request: Publish) -> bool:
        """Whether the rest of a payload is awaited in memory."""
        expected = request.payload_bytes
        return expected <= RECEIVE_BYTES and self._kept_bytes + expected <= KEPT_TOTAL_MAX_BYTES

    def _open_spool(self, request: Publish, route: Route, gate: Gate) -> Spooling:
        # A payload gathers in a file, and is copied from there: it takes its size twice.
        others = [each.spooling for each in self._open.values() if each.spooling is not None]
        promised_bytes = sum(other.missing_bytes + other.request.payload_bytes for other in others)
        try:
            gate.require_room(2 * request.payload_bytes, promised_bytes)
            spooling = Spooling(request, route, self._spool_directory)
            if not self._admission.leaves_enough(spooling.descriptor):
                spooling.close()
                raise ProtocolError(Code.FAILED, "too few descriptors are left")
            return spooling
        except ProtocolError as error:
            error.payload_bytes = request.payload_bytes
            raise
        except OSError as error:
            raise ProtocolError(_no_spool(error), str(error), payload_bytes=request.payload_bytes) from error

    def _spool(self, connection: Connection, data: memoryview, gate: Gate) -> int:
        spooling = connection.spooling
        assert spooling is not None
        try:
            gate.require_room()  # again: others may have used it up since the request began
            return spooling.feed(data)
        except Parked as parked:
            self._wait(connection, parked.cause)
            return 0
        except ProtocolError as error:
            refusal = encode_err(error.code, error.words)
        except OSError as error:
            refusal = encode_err(_no_spool(error), str(error))
        connection.spooling = None
        connection.skip_bytes = spooling.missing_bytes
        connection.answers.append(refusal)
        spooling.close()
        return 0

    def _publish_gathered(self, connection: Connection, turn: Turn, gate: Gate) -> None:
        spooling = connection.spooling
        assert spooling is not None
        try:
            gate.pass_through(spooling.route)  # again: a pipe may have begun a long line since the request began
            connection.answers.append(publish_spooled(turn, spooling, connection.user_id))
        except Parked as parked:
            self._wait(connection, parked.cause)
            return
        except ProtocolError as error:
            connection.answers.append(encode_err(error.code, error.words))
        connection.spooling = None
        self._spooled.append(spooling)

    def _send(self, connection: Connection, data: bytes | memoryview) -> None:
        if connection.unsent:
            data = b"".join((connection.unsent, data)) if data else connection.unsent
        before = connection.wanted_events
        try:
            sent = connection.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the peer is gone; what it was to be told is in the log all the same
            self._close(connection)
            return
        unsent = memoryview(data)[sent:] if sent < len(data) else b""  # one answer may be shared by many
        self._unsent_bytes += len(unsent) - len(connection.unsent)
        connection.unsent = unsent
        self._watch(connection, before)
        if connection.closing and not unsent:
            self._close(connection)
        while self._unsent_bytes > UNSENT_TOTAL_MAX_BYTES:
            slowest = min((each for each in self._open.values() if each.unsent), key=lambda each: each.since)
            self._admission.refuse(slowest.user_id, "replies that nobody reads fill the memory")
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
        if connection.spooling is not None:
            connection.spooling.close()
        self._kept_bytes -= len(connection.kept)
        self._unsent_bytes -= len(connection.unsent)
        connection.unsent = b""
        self._admission.leave(connection.user_id)
        connection.socket.close()
        self._listen(True)

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listening and self._listener.fileno() >= 0:
            self._listening = wanted
            self._poller.modify(self._listener, select.EPOLLIN if wanted else 0)


def _no_spool(error: OSError) -> Code:
    return Code.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Code.FAILED
