"""Requests in flight on one connection, and their retries.

Which error a refusal by the daemon, or its silence, is for the caller, and what to type next.

The requests of one producer that are under way: numbered, sent again after a lost connection, answered in order.

Not for several threads, except :attr:`Session.unanswered`: :mod:`wald.client.producer` admits one call at a time.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wald.client.connection import Connection, seconds_until, status
from wald.client.payloads import records_in
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.protocol import REQUEST_MAX_BYTES, Code, ProtocolError, Publish, encode_publish, parse_reply


def refused(error: ProtocolError, request: bytes, *, root: Path | None, socket: Path) -> WaldError:
    """The error for an ERR that does not pass.

    Args:
        error: the answer of the daemon.
        request: the request line that got this answer.
        root: root of the log; None if it is not known.
        socket: its owner is the user that the daemon runs as.
    """
    words = request.decode(errors="replace").split()
    route = words[2] if words[:1] == ["ROUTE"] else words[1] if len(words) > 1 else ""
    match error.code:
        case Code.NO_ROUTE:
            message, _, _ = error.message.partition("; ROUTE ")  # what follows is for clients of the bare protocol
            return NotFound(
                message,
                case="route-missing-at-daemon",
                root=root,
                route=route,
                socket=socket,
                is_retired="retired" in error.message,
            )
        case Code.DENIED:
            return NotPermitted(error.message, case="request-denied", words=words, route=route, socket=socket)
        case Code.GAP | Code.FORGOTTEN | Code.CONFLICT:
            return Refused(error.message, case="producer-out-of-step", root=root, route=route)
        case Code.TOO_LARGE:
            return InvalidInput(error.message, case="request-too-large")
        case _:
            return InvalidInput(f"{error.code}: {error.message}", case="request-refused")


def unreachable(reason: OSError | ProtocolError, *, root: Path | None, socket: Path) -> WaldError:
    """The error for a daemon that was waited for in vain.

    Args:
        reason: how the last attempt failed.
        root: root of the log; None if it is not known.
        socket: where the daemon should listen.
    """
    if isinstance(reason, ProtocolError):
        message, is_full = f"{socket}: {reason.code}: {reason.message}", reason.code is Code.FULL
        if is_full and _is_quota(status(socket)):
            return Unavailable(message, case="daemon-over-quota", root=root, socket=socket)
        if is_full:
            return DiskFailure(message, case="daemon-lacks-room", root=root, socket=socket)
        return Unavailable(message, case="daemon-not-available", root=root, socket=socket)
    if isinstance(reason, PermissionError):
        return NotPermitted.from_error(reason, socket)
    if isinstance(reason, TimeoutError):
        return _silent(root, socket)
    return Unavailable(
        f"{socket}: no daemon answers ({reason.strerror or reason})", case="no-daemon", root=root, socket=socket
    )


def _silent(root: Path | None, socket: Path) -> WaldError:
    """The error for a daemon that is connected and does not answer: its STAT may say why."""
    state = status(socket)
    if state.get("degraded"):
        numbers = f"{state.get('free_bytes')} bytes are free of {state.get('needed_bytes')} that are needed"
        return DiskFailure(
            f"{socket}: the disk is full: {numbers}; the daemon waits for space",
            case="daemon-lacks-room",
            root=root,
            socket=socket,
        )
    if state.get("held_requests"):
        return DiskFailure(
            f"{socket}: the disk has no space for a request of this size",
            case="daemon-lacks-room",
            root=root,
            socket=socket,
        )
    over = state.get("over_quota")
    if isinstance(over, list) and over:
        return Unavailable(
            f"{socket}: the daemon does not accept it now: {over[0].get('message')}",
            case="daemon-over-quota",
            root=root,
            socket=socket,
        )
    return Unavailable(  # without a state, it is stopped by a signal, or hangs
        f"{socket}: the daemon does not answer",
        case="daemon-lacks-room" if state else "daemon-hangs",
        root=root,
        socket=socket,
    )


def _is_quota(state: Mapping[str, object]) -> bool:
    """Whether it is a quota, and not the disk, that lets a daemon of this STAT refuse records."""
    return bool(state.get("over_quota")) and not state.get("degraded")


WINDOW = 8  # requests under way; the daemon remembers 16 a producer, so all of them can be repeated
SOCKET_NAME = "wald.sock"
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0  # between attempts to connect, doubled every time
_ACKNOWLEDGED = re.compile(rb"OK .*\n")
_TRY_AGAIN = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})


class Durable(NamedTuple):
    """The sequences of the first and the last record of one acknowledged request; its records are on disk."""

    first: int
    last: int


class Session:
    """Connects on :meth:`connect`; an error that does not pass ends it.

    Args:
        path: the socket.
        producer_id: None: a random one.
        retry_for: seconds without any progress after which it gives up.
        number: the number of the producer's previous request.
    """

    def __init__(self, path: Path, *, producer_id: int | None, retry_for: float, number: int = 0) -> None:
        self._path = path
        self._root = path.parent if path.name == SOCKET_NAME else None  # a socket elsewhere does not show its root
        self._id = producer_id or int.from_bytes(os.urandom(8)) >> 1 or 1
        self._retry_for = retry_for
        self._connection = Connection(path)
        self._number = number
        self._is_established = False
        self._durable: list[Durable] = []
        self._under_way: deque[tuple[bytes, bytes | memoryview]] = deque()
        self._deadline: float | None = None  # of a trouble, which ends with an answer, not with a connection
        self._last_error: ProtocolError | None = None  # that the daemon answered in this trouble
        self._ended = ""  # the message of the error that ended it
        self._pause = _PAUSE_SECONDS

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    @property
    def unanswered(self) -> int:
        """How many records are sent and not answered; another thread may ask, so it counts in a copy."""
        return sum(records_in(line, payload) for line, payload in tuple(self._under_way))

    def connect(self, within: float) -> None:
        """
        Raises:
            WaldError: no daemon could be reached within so many seconds.
        """
        self._recover(None, time.monotonic() + within)
        self._trouble_ends()

    def disconnect(self) -> None:
        """Close the connection, without reading from it."""
        self._connection.close()

    def close(self) -> None:
        """Close the connection, and end."""
        self._connection.read_available()
        self.disconnect()
        self._take_answers()
        self._ended = self._ended or f"{self._path}: it was closed"

    def publish(self, route: str, payload: bytes | memoryview, columns: bool) -> None:
        """Send one request; returns when it is under way."""
        if len(payload) > REQUEST_MAX_BYTES:
            raise InvalidInput(
                f"route {route}: a record of {len(payload)} bytes; the limit is {REQUEST_MAX_BYTES}",
                case="record-too-large",
            )
        # The first goes alone: the daemon lets a new producer start at any number, so if it took the second and not
        # the first, the first would come too late.
        while len(self._under_way) >= (WINDOW if self._is_established else 1):
            self._receive()
        self._number += 1
        request = Publish(route.encode(), len(payload), columns, self._id, self._number)
        self._send(encode_publish(request), payload)

    def _send(self, line: bytes, payload: bytes | memoryview) -> None:
        deadline = self._give_up_at()
        self._under_way.append((line, payload))
        try:
            self._connection.send(line, payload, deadline)
        except OSError as error:
            self._recover(error, deadline)

    def _receive(self) -> None:
        first, last = self._answer().split()
        self._is_established = True
        self._durable.append(Durable(int(first), int(last)))
        self._under_way.popleft()  # last: what raises before, as Ctrl-C may, leaves the request among the unanswered

    def receive_all(self) -> None:
        """Wait until every request is answered."""
        while self._under_way:
            self._receive()

    def command(self, *arguments: str) -> str:
        """Send a request that carries no records, after all others are answered; returns the text behind OK."""
        self.receive_all()
        self._send(" ".join(arguments).encode() + b"\n", b"")
        answer = self._answer()
        self._under_way.popleft()
        return answer

    def take_durable(self) -> list[Durable]:
        """What has become durable since the last call."""
        durable, self._durable = self._durable, []
        return durable

    def read_answers(self) -> None:
        """Take the acknowledgements that have arrived, without waiting for more."""
        self._connection.read_available()
        self._take_answers()

    def wait_for(self, descriptor: int) -> None:
        """Return once ``descriptor`` can be read; meanwhile take acknowledgements, and send lost requests again."""
        while not self._is_readable(descriptor):
            self._receive()

    def _take_answers(self) -> None:
        """Take the acknowledgements that have been read; an error is left for the next call that waits."""
        while self._under_way and self._under_way[0][0].startswith(b"PUB "):
            if not _ACKNOWLEDGED.match(self._connection.received):
                return
            self._receive()

    def _is_readable(self, descriptor: int) -> bool:
        """Wait for either: True if ``descriptor`` can be read, False if there is an answer to take."""
        while b"\n" not in self._connection.received:
            deadline = self._give_up_at()
            if self._under_way and not self._connection.is_open:
                self._recover(None, deadline)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if self._under_way and self._connection.is_open:
                poller.register(self._connection, select.POLLIN)
            readable = dict(poller.poll(seconds_until(deadline) * 1000 if self._under_way else None))
            if readable:
                return descriptor in readable
            self._recover(TimeoutError(), deadline)
        return False

    def _answer(self) -> str:
        """The answer to the oldest request, which the caller then forgets; errors that pass are waited out."""
        deadline = self._give_up_at()
        while True:
            try:
                text = parse_reply(self._connection.read_line(deadline))
            except OSError as error:
                self._recover(error, deadline)
            except ProtocolError as error:
                self._connection.close()
                if error.code not in _TRY_AGAIN:
                    request, _ = self._under_way[0]
                    self._under_way.clear()
                    raise self._end(refused(error, request, root=self._root, socket=self._path)) from None
                self._connection.received = b""  # answers to requests behind the one that failed are errors, too
                self._recover(error, deadline)
            else:
                self._trouble_ends()
                return text

    def _trouble_ends(self) -> None:
        self._deadline, self._pause, self._last_error = None, _PAUSE_SECONDS, None

    def _end(self, error: WaldError) -> WaldError:
        self._ended = error.message
        return error

    def _give_up_at(self) -> float:
        """When a call that begins to wait now gives up, on the monotonic clock.

        Raises:
            Refused: the producer has ended.
        """
        if self._ended:
            raise Refused(
                f"the producer has ended: {self._ended}",
                case="producer-has-ended",
            )
        return time.monotonic() + self._retry_for if self._deadline is None else self._deadline

    def _recover(self, reason: OSError | ProtocolError | None, deadline: float) -> None:
        """Connect anew and send again what is under way; if all of it was answered, the next call that sends does."""
        self._deadline = deadline
        while True:
            reason = self._keep_answers() or reason
            self._connection.close()
            if self._under_way and self._connection.received.count(b"\n") == len(self._under_way):
                return
            if isinstance(reason, ProtocolError):
                self._last_error = reason
            if reason is not None:
                if time.monotonic() >= deadline or isinstance(reason, PermissionError):
                    raise self._give_up(reason)
                time.sleep(min(self._pause, max(0.0, deadline - time.monotonic())))
                self._pause = min(2 * self._pause, _PAUSE_MAX_SECONDS)
            try:
                self._connection.open()
                for line, payload in islice(self._under_way, self._connection.received.count(b"\n"), None):
                    self._connection.send(line, payload, deadline)
            except OSError as failure:
                reason = failure
            else:
                return

    def _keep_answers(self) -> ProtocolError | None:
        """Keep the answers that arrived before the connection broke; those on a new connection follow them.

        Returns:
            the error that the daemon answered before it closed the connection, if there is one and it may pass.
        """
        if not self._connection.is_open:
            return None
        self._connection.read_available()
        lines, self._connection.received = self._connection.received.splitlines(keepends=True), b""
        for line in lines:
            try:
                if line.endswith(b"\n"):
                    parse_reply(line)
                    self._connection.received += line
            except ProtocolError as error:
                return error if error.code in _TRY_AGAIN else None
        return None

    def _give_up(self, reason: OSError | ProtocolError) -> WaldError:
        if isinstance(reason, TimeoutError) and self._last_error is not None:
            reason = self._last_error  # the last attempt had only too little time to get it again
        error = unreachable(reason, root=self._root, socket=self._path)
        self._take_answers()  # these records are durable, though their daemon is given up
        return self._end(error)
