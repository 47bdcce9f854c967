"""Session of a producer: sends numbered requests, resends them after a lost connection, reads answers in order.

Not thread-safe, except :attr:`Session.unanswered`: :mod:`wald.client.producer` admits one call at a time.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wald.client.connection import connect, status
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.protocol import (
    REQUEST_MAX_BYTES,
    Code,
    ProtocolError,
    Publish,
    encode_publish,
    parse_reply,
    parse_request,
)


def permanent_error(error: ProtocolError, request: bytes, *, root: Path | None, socket: Path) -> WaldError:
    """Convert a permanent ERR reply to the line ``request`` into a WaldError."""
    words = request.decode(errors="replace").split()
    route = words[2] if words[:1] == ["ROUTE"] else words[1] if len(words) > 1 else ""
    match error.code:
        case Code.NO_ROUTE:
            message, _, _ = error.message.partition("; ROUTE ")  # the rest is for clients without a library
            if "retired" in error.message:
                return NotFound(message, case="route-retired-at-daemon", root=root, route=route, socket=socket)
            return NotFound(message, case="route-missing-at-daemon", root=root, route=route)
        case Code.DENIED:
            return NotPermitted(error.message, case="request-denied", words=words, route=route, socket=socket)
        case Code.GAP | Code.FORGOTTEN | Code.CONFLICT:
            return Refused(error.message, case="producer-out-of-step", root=root, route=route)
        case Code.TOO_LARGE:
            return InvalidInput(error.message, case="request-too-large")
        case _:
            return InvalidInput(f"{error.code}: {error.message}", case="request-refused")


def error_after_retries(reason: OSError | ProtocolError, *, root: Path | None, socket: Path) -> WaldError:
    """Convert the failure of the last retry into a WaldError."""
    if isinstance(reason, ProtocolError):
        message = f"{socket}: {reason.code}: {reason.message}"
        if reason.code is Code.FULL:
            state = status(socket)
            if state.get("over_quota") and not state.get("degraded"):
                return Unavailable(message, case="daemon-over-quota", root=root, socket=socket)
            return DiskFailure(message, case="daemon-lacks-room", root=root, socket=socket)
        return Unavailable(message, case="daemon-not-available", root=root, socket=socket)
    if isinstance(reason, PermissionError):
        return NotPermitted.from_error(reason, socket)
    if isinstance(reason, TimeoutError):
        return _no_answer(root, socket)
    return Unavailable(
        f"{socket}: no daemon answers ({reason.strerror or reason})", case="no-daemon", root=root, socket=socket
    )


def _no_answer(root: Path | None, socket: Path) -> WaldError:
    """Return the error for a daemon that accepts connections but does not answer."""
    state = status(socket)
    if state.get("degraded"):
        numbers = f"{state.get('free_bytes')} of the required {state.get('needed_bytes')} bytes are free"
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
    over_quota = state.get("over_quota")
    if isinstance(over_quota, list) and over_quota:
        return Unavailable(
            f"{socket}: the daemon does not accept records now: {over_quota[0].get('message')}",
            case="daemon-over-quota",
            root=root,
            socket=socket,
        )
    return Unavailable(  # without a state, the daemon hangs or is stopped
        f"{socket}: the daemon does not answer",
        case="daemon-lacks-room" if state else "daemon-hangs",
        root=root,
        socket=socket,
    )


WINDOW = 8  # requests in flight; the daemon deduplicates the last 16 of a producer, so all can be resent
SOCKET_NAME = "wald.sock"
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0  # between attempts to connect; doubled each time
_RECEIVE_BYTES = 64 << 10
_TIMEOUT_MIN_SECONDS = 0.001  # so that a received answer is read even after the deadline
TRY_AGAIN = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})


class Durable(NamedTuple):
    """First and last sequence of an acknowledged request."""

    first: int
    last: int


def count_records(line: bytes, payload: bytes | memoryview) -> int:
    """Return the number of records in a request."""
    from wald.format.records import decode_columns

    request = parse_request(line)
    if not isinstance(request, Publish):
        return 0
    return decode_columns(payload).count if request.columns else bytes(payload).count(b"\n")


def check_size(route: str, payload: bytes | memoryview) -> None:
    if len(payload) > REQUEST_MAX_BYTES:
        raise InvalidInput(
            f"route {route}: a record of {len(payload)} bytes exceeds the limit of {REQUEST_MAX_BYTES}",
            case="record-too-large",
        )


def random_id() -> int:
    return int.from_bytes(os.urandom(8)) >> 1 or 1


class Sent(NamedTuple):
    """Request in flight."""

    line: bytes
    payload: bytes | memoryview
    pending: Pending | None  # None for a command


class Pending:
    """Requests of one call that sends records, and the sequences of those that were acknowledged."""

    def __init__(self) -> None:
        self.requests = 0
        self.durable: list[Durable] = []

    @property
    def is_done(self) -> bool:
        return len(self.durable) == self.requests


class Session:
    """Requests and answers of one producer, across reconnections.

    The session ends with a permanent error, or after ``retry_for`` seconds without progress. ``number`` is that of the
    producer's previous request.
    """

    def __init__(self, path: Path, *, producer_id: int | None, retry_for: float, number: int = 0) -> None:
        self._path = path
        self._root = path.parent if path.name == SOCKET_NAME else None  # unknown for a socket elsewhere
        self._id = producer_id or random_id()
        self._retry_for = retry_for
        self._socket: socket.socket | None = None
        self._received = b""  # not yet parsed; kept after the connection breaks
        self._number = number
        self._is_established = False
        self._durable: dict[int, Durable] = {}  # by first sequence
        self._in_flight: deque[Sent] = deque()
        self._deadline: float | None = None  # of the current failure, which only an answer ends
        self._last_error: ProtocolError | None = None  # the daemon's, in the current failure
        self.end_reason = ""
        self._pause = _PAUSE_SECONDS

    @property
    def unanswered(self) -> int:
        """Number of records in flight, counted thread-safely in a copy."""
        return sum(count_records(sent.line, sent.payload) for sent in tuple(self._in_flight))

    def connect(self, within: float) -> None:
        """Connect, or raise WaldError after ``within`` seconds."""
        self._recover(None, time.monotonic() + within)
        self._clear_failure()

    def disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._read_available()
        self.disconnect()
        self._process_answers()
        self.end_reason = self.end_reason or f"{self._path}: close() was called"

    def publish(self, route: str, payload: bytes | memoryview, columns: bool, pending: Pending | None = None) -> None:
        check_size(route, payload)
        # Send the first request alone: a new producer may start at any number, so if the daemon accepted only the
        # second, it would refuse the first as too old.
        while len(self._in_flight) >= (WINDOW if self._is_established else 1):
            self._receive()
        self._number += 1
        request = Publish(route.encode(), len(payload), columns, self._id, self._number)
        self._send(Sent(encode_publish(request), payload, pending or Pending()))

    def _send(self, request: Sent) -> None:
        deadline = self._start_deadline()
        self._in_flight.append(request)
        if request.pending is not None:
            request.pending.requests += 1
        try:
            self._transmit(request, deadline)
        except OSError as error:
            self._recover(error, deadline)

    def _transmit(self, request: Sent, deadline: float) -> None:
        """Send one request. Raise OSError if the connection breaks or the deadline passes."""
        connection = self._require_socket(deadline)
        line, payload, _ = request
        try:
            sent = connection.sendmsg([line, payload])
            if sent < len(line):
                connection.sendall(line[sent:])
                sent = len(line)
            if sent < len(line) + len(payload):
                connection.sendall(memoryview(payload)[sent - len(line) :])
        except OSError:
            raise
        except BaseException:  # from a signal handler: the daemon would read the next request as part of this one
            self._read_available()
            self.disconnect()
            raise

    def _read_line(self, deadline: float) -> bytes:
        """Wait for the next line of an answer. Raise OSError like :meth:`_transmit`."""
        while b"\n" not in self._received:
            received = self._require_socket(deadline).recv(_RECEIVE_BYTES)
            if not received:
                raise ConnectionResetError("the daemon closed the connection")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _read_available(self) -> None:
        if self._socket is None:
            return
        self._socket.setblocking(False)  # with a timeout, recv would wait despite MSG_DONTWAIT
        with suppress(OSError):
            while received := self._socket.recv(_RECEIVE_BYTES):
                self._received += received

    def _require_socket(self, deadline: float) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("the connection was closed")
        self._socket.settimeout(_seconds_until(deadline))
        return self._socket

    def _receive(self) -> None:
        """Wait for the acknowledgement of the oldest request."""
        durable = Durable(*map(int, self._answer().split()))
        self._is_established = True
        self._durable[durable.first] = durable
        pending = self._in_flight[0].pending
        if pending is not None and durable not in pending.durable[-1:]:  # if Ctrl-C came before the next line
            pending.durable.append(durable)
        self._in_flight.popleft()  # last, so that after Ctrl-C the request still counts as unanswered

    def receive_all(self) -> None:
        while self._in_flight:
            self._receive()

    def receive(self, pending: Pending) -> list[Durable]:
        """Wait until the requests of ``pending`` are durable; do not report them again."""
        while not pending.is_done:
            self._start_deadline()  # raises the error after which nothing is in flight
            self._receive()
        for durable in pending.durable:
            self._durable.pop(durable.first, None)
        return pending.durable

    def command(self, *arguments: str) -> str:
        self.receive_all()
        self._send(Sent(" ".join(arguments).encode() + b"\n", b"", None))
        answer = self._answer()
        self._in_flight.popleft()
        return answer

    def pop_durable(self) -> list[Durable]:
        durable, self._durable = self._durable, {}
        return list(durable.values())

    def read_answers(self) -> None:
        self._read_available()
        self._process_answers()

    def wait_for(self, descriptor: int) -> None:
        while not self._wait_for_descriptor_or_answer(descriptor):
            self._receive()

    def _process_answers(self) -> None:
        """Process the acknowledgements received so far. Leave an error to the next call that waits."""
        while self._in_flight and self._in_flight[0].pending is not None:
            if not self._received.startswith(b"OK ") or b"\n" not in self._received:
                return
            self._receive()

    def _wait_for_descriptor_or_answer(self, descriptor: int) -> bool:
        """Return True once the descriptor is readable, or False once an answer has arrived."""
        while b"\n" not in self._received:
            deadline = self._start_deadline()
            if self._in_flight and self._socket is None:
                self._recover(None, deadline)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if self._in_flight and self._socket is not None:
                poller.register(self._socket, select.POLLIN)
            ready = dict(poller.poll(_seconds_until(deadline) * 1000 if self._in_flight else None))
            if ready:
                return descriptor in ready
            self._recover(TimeoutError(), deadline)
        return False

    def _answer(self) -> str:
        """Wait for the answer to the oldest request, with retries. The caller removes the request."""
        deadline = self._start_deadline()
        while True:
            try:
                text = parse_reply(self._read_line(deadline))
            except OSError as error:
                self._recover(error, deadline)
            except ProtocolError as error:
                self.disconnect()
                if error.code not in TRY_AGAIN:
                    request = self._in_flight[0].line
                    self._in_flight.clear()
                    raise self._end(permanent_error(error, request, root=self._root, socket=self._path)) from None
                self._received = b""  # answers to later requests are errors as well
                self._recover(error, deadline)
            else:
                self._clear_failure()
                return text

    def _clear_failure(self) -> None:
        self._deadline, self._pause, self._last_error = None, _PAUSE_SECONDS, None

    def _end(self, error: WaldError) -> WaldError:
        self.end_reason = error.message
        return error

    def _start_deadline(self) -> float:
        """Return the deadline of a call that starts now. Raise Refused if the session has ended."""
        if self.end_reason:
            raise Refused(f"the producer has ended: {self.end_reason}", case="producer-has-ended")
        return time.monotonic() + self._retry_for if self._deadline is None else self._deadline

    def _recover(self, reason: OSError | ProtocolError | None, deadline: float) -> None:
        """Reconnect and resend the unanswered requests; give up at ``deadline``.

        If all requests are answered, leave the connection closed: the next call that sends reconnects.
        """
        self._deadline = deadline
        while True:
            reason = self._keep_answers() or reason
            self.disconnect()
            if self._in_flight and self._received.count(b"\n") == len(self._in_flight):
                return
            if isinstance(reason, ProtocolError):
                self._last_error = reason
            if reason is not None:
                if time.monotonic() >= deadline or isinstance(reason, PermissionError):
                    raise self._give_up(reason)
                time.sleep(min(self._pause, max(0.0, deadline - time.monotonic())))
                self._pause = min(2 * self._pause, _PAUSE_MAX_SECONDS)
            try:
                self._socket = connect(self._path)
                for request in islice(self._in_flight, self._received.count(b"\n"), None):
                    self._transmit(request, deadline)
            except OSError as failure:
                reason = failure
            else:
                return

    def _keep_answers(self) -> ProtocolError | None:
        """Keep answers from before the connection broke. Return a temporary error that followed them."""
        if self._socket is None:
            return None
        self._read_available()
        lines, self._received = self._received.splitlines(keepends=True), b""
        for line in lines:
            try:
                if line.endswith(b"\n"):
                    parse_reply(line)
                    self._received += line
            except ProtocolError as error:
                return error if error.code in TRY_AGAIN else None
        return None

    def _give_up(self, reason: OSError | ProtocolError) -> WaldError:
        if isinstance(reason, TimeoutError) and self._last_error is not None:
            reason = self._last_error  # the last attempt was too short to receive the error again
        error = error_after_retries(reason, root=self._root, socket=self._path)
        self._process_answers()  # the acknowledged records are durable
        return self._end(error)


def _seconds_until(deadline: float) -> float:
    return max(_TIMEOUT_MIN_SECONDS, deadline - time.monotonic())
