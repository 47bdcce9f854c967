"""Sans-IO protocol client shared by all clients, and the session of a blocking producer built on it."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

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

WINDOW = 8  # requests in flight; the daemon deduplicates the last 16 of a producer, so all can be resent
SOCKET_NAME = "wald.sock"
TRY_AGAIN = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 0.02, 1.0  # between attempts to connect; doubled each time
_RECEIVE_BYTES = 64 << 10
_TIMEOUT_MIN_SECONDS = 0.001  # so that a received answer is read even after the deadline
_PATH_MAX_BYTES = 107  # limit of a Unix socket address
_STATUS_SECONDS = 1.0


class Durable(NamedTuple):
    """First and last sequence of an acknowledged request."""

    first: int
    last: int


@dataclass(slots=True, eq=False)
class Request:
    """Request and its reply; ``route`` is empty for a command."""

    route: str
    line: bytes
    payload: bytes | memoryview
    reply: str | None = None

    @property
    def is_done(self) -> bool:
        return self.reply is not None

    @property
    def durable(self) -> Durable:
        first, last = (self.reply or "").split()
        return Durable(int(first), int(last))

    @property
    def records(self) -> int:
        """Number of records that are not answered, counted thread-safely."""
        from wald.format.records import decode_columns

        payload = self.payload  # before checking the reply, which frees it
        request = parse_request(self.line)
        if self.reply is not None or not isinstance(request, Publish):
            return 0
        return decode_columns(payload).count if request.columns else bytes(payload).count(b"\n")


R = TypeVar("R", bound=Request)


class Pipeline(Generic[R]):
    """Sans-IO state of a connection: waiting requests, and up to ``window`` in flight, in the order of replies.

    An interruption may leave a request in both, until :meth:`lose`.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.waiting: OrderedDict[R, None] = OrderedDict()
        self.in_flight: deque[R] = deque()
        self._received = b""

    def __iter__(self) -> Iterator[R]:
        yield from self.in_flight
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.waiting)

    def next_request(self) -> R | None:
        while self.waiting and len(self.in_flight) < self.window:
            request = next(iter(self.waiting))
            if not request.is_done:
                self.in_flight.append(request)
                del self.waiting[request]
                return request
            del self.waiting[request]
        return None

    def receive(self, data: bytes) -> Iterator[tuple[R, str | ProtocolError]]:
        """Yield the requests that ``data`` answers; each is in flight, and its reply unread, until the next step."""
        *lines, rest = (self._received + data).split(b"\n")
        at = 0
        try:
            for line in lines:
                if self.in_flight:  # otherwise the daemon reports why it closes the connection
                    request = self.in_flight[0]
                    try:
                        yield request, parse_reply(line)
                    except ProtocolError as error:
                        yield request, error
                    self.in_flight.popleft()
                at += 1
        finally:
            self._received = b"\n".join([*lines[at:], rest])

    def lose(self) -> int:
        """Move requests in flight back to the front of the queue; return their number. Drop finished ones."""
        lost = [request for request in self.in_flight if not request.is_done]
        waiting = [request for request in self.waiting if not request.is_done]
        self.waiting = OrderedDict.fromkeys([*lost, *waiting])
        self.in_flight.clear()
        self._received = b""
        return len(lost)


class Session:
    """Requests and replies of one producer, across reconnections.

    The session ends with a permanent error, or after ``retry_for`` seconds without progress. ``number`` is that of the
    producer's previous request. Not thread-safe, except :attr:`unanswered`.

    A signal handler may raise an exception at any point, as Ctrl-C does. The next call then drops the connection and
    resends unanswered requests, which the daemon deduplicates.
    """

    def __init__(self, path: Path, *, producer_id: int | None, retry_for: float, number: int = 0) -> None:
        self._path = path
        self._root = path.parent if path.name == SOCKET_NAME else None  # unknown for a socket elsewhere
        self._id = producer_id or random_id()
        self._retry_for = retry_for
        self._number = number
        self._socket: socket.socket | None = None
        # Send the first request alone: a new producer may start at any number, so if the daemon accepted only the
        # second, it would refuse the first as too old.
        self._pipeline: Pipeline[Request] = Pipeline(1)
        self._durable: dict[int, Durable] = {}  # by first sequence
        self._deadline: float | None = None  # of the current failure; only an answer resets it
        self._last_error: ProtocolError | None = None  # the daemon's, in the current failure
        self._pause = PAUSE_SECONDS
        self._is_calling = False  # still true after an interrupted call
        self._is_reading = False  # replies are between the socket and their requests
        self.end_reason = ""

    @property
    def unanswered(self) -> int:
        """Number of records that are not answered, counted thread-safely in a copy."""
        requests = [*self._pipeline.in_flight.copy(), *self._pipeline.waiting.copy()]
        return sum(request.records for request in dict.fromkeys(requests))

    def connect(self, within: float) -> None:
        with self._call():
            self._recover(None, time.monotonic() + within)
            self._clear_failure()

    def disconnect(self) -> None:
        """Close the socket without reading it; a child of a fork shares it with its parent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        with self._call():
            self._lose_connection()
        self.end_reason = self.end_reason or f"{self._path}: close() was called"

    def publish(self, route: str, payload: bytes | memoryview, columns: bool, requests: list[Request]) -> None:
        check_size(route, payload)
        with self._call():
            self._await(lambda: len(self._pipeline) < self._pipeline.window)
            number = self._number + 1
            publish = Publish(route.encode(), len(payload), columns, self._id, number)
            request = Request(route, encode_publish(publish), payload)
            requests.append(request)
            self._send(request, number)

    def receive_all(self) -> None:
        if self._pipeline:
            with self._call():
                self._await(lambda: not self._pipeline)

    def receive(self, requests: Sequence[Request]) -> list[Durable]:
        """Wait until the requests are durable; do not report them again."""
        if not all(request.is_done for request in requests):
            with self._call():
                self._await(lambda: all(request.is_done for request in requests))
        durable = [request.durable for request in requests]
        for each in durable:
            self._durable.pop(each.first, None)
        return durable

    def command(self, *arguments: str) -> str:
        request = Request("", " ".join(arguments).encode() + b"\n", b"")
        with self._call():
            self._await(lambda: not self._pipeline)
            self._send(request, self._number)
            self._await(lambda: request.is_done)
        return request.reply or ""

    def pop_durable(self) -> list[Durable]:
        durable, self._durable = self._durable, {}
        return list(durable.values())

    def read_answers(self) -> None:
        """Process the acknowledgements received so far. Leave an error to the next call that waits."""
        if self._socket is not None or self._is_calling:
            with self._call():
                self._read_available()

    def wait_for(self, descriptor: int) -> None:
        """Process answers until the descriptor is readable."""
        with self._call():
            self._await(lambda: False, descriptor)

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self._is_calling:  # the last call was interrupted or ended the session
            self._lose_connection()
            for request in [each for each in self._pipeline.waiting if not each.route]:
                del self._pipeline.waiting[request]  # the interrupted call no longer awaits it
        self._is_calling = True
        yield
        self._is_calling = False

    def _await(self, is_done: Callable[[], bool], descriptor: int = -1) -> None:
        """Process answers until ``is_done``, or the descriptor is readable; recover from failures."""
        while True:
            deadline = self._start_deadline()
            error: OSError | ProtocolError | None = None
            try:
                if (error := self._process()) is None:
                    if is_done() or self._poll(descriptor, deadline):
                        return
                    error = self._read() if self._pipeline else None
            except OSError as failure:
                error = failure
            if isinstance(error, ProtocolError) and is_done():
                return  # it is the answer to a later request, and stays unread until the next call
            if isinstance(error, ProtocolError) and error.code not in TRY_AGAIN:
                line = self._pipeline.in_flight[0].line
                self.disconnect()
                self._pipeline = Pipeline(1)
                raise self._end(permanent_error(error, line, root=self._root, socket=self._path)) from None
            if error is not None:
                self._recover(error, deadline)

    def _poll(self, descriptor: int, deadline: float) -> bool:
        """Wait for an answer or the descriptor; return True if the descriptor is readable. Raise OSError if late."""
        poller = select.poll()
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
        if self._pipeline:
            poller.register(self._require_socket(), select.POLLIN)
        ready = dict(poller.poll(_seconds_until(deadline) * 1000 if self._pipeline else None))
        if not ready:
            raise TimeoutError
        return descriptor in ready

    def _read(self) -> ProtocolError | None:
        """Process received data without waiting. Raise OSError if there is none, or the connection has ended."""
        connection = self._require_socket()
        self._is_reading = True
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except OSError:
            self._is_reading = False
            raise
        error = self._process(data)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        return error

    def _read_available(self) -> ProtocolError | None:
        error = self._process()
        with suppress(OSError):
            while error is None:
                error = self._read()
        return error

    def _process(self, data: bytes = b"") -> ProtocolError | None:
        """Process the replies received so far; return the first error, which stays unread."""
        self._is_reading = True
        error = None
        for request, reply in self._pipeline.receive(data):
            if isinstance(reply, ProtocolError):
                error = reply
                break
            if request.route:
                first, last = map(int, reply.split())
                self._durable[first] = Durable(first, last)
                self._pipeline.window = WINDOW
            request.reply = reply
            request.payload = b""  # receipts keep the request
            self._clear_failure()
        self._is_reading = False
        return error

    def _send(self, request: Request, number: int) -> None:
        """Send a request, and set the producer's last number to ``number``."""
        deadline = self._start_deadline()
        self._pipeline.waiting[request] = None
        self._number = number  # no call in between, during which a signal handler could raise
        try:
            self._transmit(deadline)
        except OSError as error:
            self._recover(error, deadline)

    def _transmit(self, deadline: float) -> None:
        """Send the waiting requests. Raise OSError if the connection breaks or the deadline passes."""
        connection = self._require_socket()
        while request := self._pipeline.next_request():
            rest = [memoryview(request.line), memoryview(request.payload)]
            while rest:
                try:
                    sent = connection.sendmsg(rest)
                except BlockingIOError:
                    poller = select.poll()
                    poller.register(connection, select.POLLOUT)
                    if not poller.poll(_seconds_until(deadline) * 1000):
                        raise TimeoutError from None
                    continue
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]

    def _require_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("the connection was closed")
        return self._socket

    def _clear_failure(self) -> None:
        self._deadline, self._pause, self._last_error = None, PAUSE_SECONDS, None

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
            was_empty = not self._pipeline
            reason = self._lose_connection() or reason
            if not self._pipeline and not was_empty:
                return
            self._deadline = deadline = self._start_deadline()  # another one if an answer has ended the failure
            if isinstance(reason, ProtocolError):
                self._last_error = reason
            if reason is not None:
                if time.monotonic() >= deadline or isinstance(reason, PermissionError):
                    raise self._give_up(reason)
                time.sleep(min(self._pause, max(0.0, deadline - time.monotonic())))
                self._pause = min(2 * self._pause, PAUSE_MAX_SECONDS)
            try:
                self._socket = connect(self._path)
                self._socket.setblocking(False)
                self._transmit(deadline)
            except OSError as failure:
                reason = failure
            else:
                return

    def _lose_connection(self) -> ProtocolError | None:
        """Process the replies received before the connection broke; close it. Return a temporary error after them."""
        error = None
        if self._socket is not None and not self._is_reading:
            error = self._read_available()
        self.disconnect()
        self._pipeline.lose()
        self._is_reading = False
        return error if error is not None and error.code in TRY_AGAIN else None

    def _give_up(self, reason: OSError | ProtocolError) -> WaldError:
        if isinstance(reason, TimeoutError) and self._last_error is not None:
            reason = self._last_error  # the last attempt was too short to receive the error again
        return self._end(error_after_retries(reason, root=self._root, socket=self._path))


def check_size(route: str, payload: bytes | memoryview) -> None:
    if len(payload) > REQUEST_MAX_BYTES:
        raise InvalidInput(
            f"route {route}: a record of {len(payload)} bytes exceeds the limit of {REQUEST_MAX_BYTES}",
            case="record-too-large",
        )


def random_id() -> int:
    return int.from_bytes(os.urandom(8)) >> 1 or 1


def _seconds_until(deadline: float) -> float:
    return max(_TIMEOUT_MIN_SECONDS, deadline - time.monotonic())


def permanent_error(error: ProtocolError, request: bytes, *, root: Path | None, socket: Path) -> WaldError:
    words = request.decode(errors="replace").split()
    route = words[2] if words[:1] == ["ROUTE"] else words[1] if len(words) > 1 else ""
    match error.code:
        case Code.NO_ROUTE:
            message, _, _ = error.message.partition("; ROUTE ")  # other codes concern clients without this library
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
    if not isinstance(reason, TimeoutError):
        message = f"{socket}: no daemon answers ({reason.strerror or reason})"
        return Unavailable(message, case="no-daemon", root=root, socket=socket)
    state = status(socket)  # the daemon accepts connections but does not answer
    if state.get("degraded"):
        numbers = f"{state.get('free_bytes')} of the required {state.get('needed_bytes')} bytes are free"
        message = f"{socket}: the disk is full: {numbers}; the daemon waits for space"
        return DiskFailure(message, case="daemon-lacks-room", root=root, socket=socket)
    if state.get("held_requests"):
        message = f"{socket}: the disk has no space for a request of this size"
        return DiskFailure(message, case="daemon-lacks-room", root=root, socket=socket)
    over_quota = state.get("over_quota")
    if isinstance(over_quota, list) and over_quota:
        message = f"{socket}: the daemon does not accept records now: {over_quota[0].get('message')}"
        return Unavailable(message, case="daemon-over-quota", root=root, socket=socket)
    message = f"{socket}: the daemon does not answer"  # without a state, it hangs or is stopped
    return Unavailable(message, case="daemon-lacks-room" if state else "daemon-hangs", root=root, socket=socket)


def connect(path: Path, *, seconds: float | None = None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        if len(os.fsencode(path)) <= _PATH_MAX_BYTES:
            connection.connect(os.fspath(path))
            return connection
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except OSError:
        connection.close()
        raise
    return connection


def status(path: Path) -> dict[str, object]:
    try:
        return ask_status(path, seconds=_STATUS_SECONDS)
    except OSError:
        return {}


def ask_status(path: Path, *, seconds: float) -> dict[str, object]:
    """Request the daemon's status (STAT). Return {} if the answer is invalid.

    Raise TimeoutError without an answer within ``seconds``, another OSError without a connection.
    """
    try:
        with connect(path, seconds=seconds) as connection, connection.makefile("rb") as replies:
            connection.sendall(b"STAT\n")
            answer = json.loads(parse_reply(replies.readline()))
    except (ValueError, ProtocolError):
        return {}
    return answer if isinstance(answer, dict) else {}
