r"""A producer: sends batches over the daemon's socket and says which sequences they got, each exactly once.

Every request carries the producer's id and a number, so after a lost connection whatever was not acknowledged is sent
again, and the daemon recognises what it has already. Up to :data:`WINDOW` requests are under way at a time; what they
carry is kept here until they are acknowledged.

    with Producer("/var/spool/wald") as producer:
        producer.publish("access", b"one\ntwo\n")
        for first, last in producer.flush(): ...
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from wald.answers import as_error
from wald.errors import DiskFailure, InvalidInput, NotPermitted, Refused, Unavailable, WaldError, command_line
from wald.format.names import check_route
from wald.format.protocol import (
    REQUEST_MAX_BYTES,
    Code,
    ProtocolError,
    Publish,
    encode_publish,
    parse_reply,
    parse_request,
)

WINDOW = 8  # requests under way; the daemon remembers 16 a producer, so all of them can be repeated
FRAME_MAX_BYTES = 128 << 10  # of whole lines in one request; a unix socket holds about twice that
SOCKET_NAME = "wald.sock"
_PATH_MAX_BYTES = 107  # what fits into a socket address
_RECEIVE_BYTES = 64 << 10
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.02, 1.0  # between attempts to connect, doubled every time
_LEAST_SECONDS = 0.001  # what is there already is taken even when time is up
_STATUS_SECONDS = 1.0  # for a daemon to say why it has not answered
_ACKNOWLEDGED = re.compile(rb"OK .*\n")
_TRY_AGAIN = frozenset({Code.FULL, Code.BUSY, Code.TIMEOUT, Code.FAILED})


class Durable(NamedTuple):
    """The sequences of one acknowledged request; its records are on disk."""

    first: int
    last: int


class Producer:
    """A connection that outlives restarts of the daemon.

    An error that the daemon answers, or its absence, ends it: what would need the daemon then raises Refused, and
    :meth:`acknowledged` and :attr:`unanswered` tell what became of the records. What is refused before it is sent, such
    as a line without a newline, does not end it.

    Threads may share one: a call waits for the others' to end. After a fork (os.fork) the child's is another producer,
    with a connection and an id of its own and nothing under way; what the parent has published the parent flushes.

    Args:
        at: the root of the log, or the socket itself.
        producer_id: 1 to 2**64 - 1; nobody else may use it at the same time, not even a fork's child.
            By default a random one.
        retry_for: seconds of waiting in which nothing has to become durable before the daemon is given up.
        connect_for: seconds for which the first connection is tried; None: ``retry_for``.

    Raises:
        Unavailable: no daemon for that long.
        NotPermitted: this user may not connect.
    """

    def __init__(
        self,
        at: Path | str,
        *,
        producer_id: int | None = None,
        retry_for: float = 30.0,
        connect_for: float | None = None,
    ) -> None:
        path = Path(at)
        self._path = path / SOCKET_NAME if path.is_dir() else path
        self._root = self._path.parent if self._path.name == SOCKET_NAME else None  # elsewhere nobody knows it
        self._given_id = producer_id
        self._retry_for = retry_for
        self._connect_for = retry_for if connect_for is None else connect_for
        self._socket: socket.socket | None = None
        self._begin()
        self._connect()
        _PRODUCERS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Be a producer that has sent nothing yet."""
        self._lock = threading.Lock()
        self._inherited = False
        self._id = self._given_id or int.from_bytes(os.urandom(8)) >> 1 or 1
        self._number = 0
        self._established = False
        self._durable: list[Durable] = []
        self._under_way: deque[tuple[bytes, bytes | memoryview]] = deque()
        self._received = b""
        self._deadline: float | None = None  # of a trouble; an answer is its end, a connection is not
        self._said: ProtocolError | None = None  # by the daemon in this trouble
        self._ended = ""  # by what
        self._pause = _PAUSE_SECONDS

    def _connect(self) -> None:
        self._recover(None, time.monotonic() + self._connect_for)
        self._over_it()

    def begin_in_child(self) -> None:
        """Leave to the parent what is the parent's; called in the child of a fork, before anything else runs there."""
        self._hang_up()  # the parent's connection stays open: it has a descriptor of its own
        self._begin()
        self._inherited = True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time; the first one in the child of a fork connects."""
        with self._lock:
            if self._inherited:
                if self._given_id:
                    raise Refused(
                        f"{self._path}: producer id {self._given_id:x} was given to the process before the fork",
                        hint="make another Producer in the child, with another id",
                    )
                self._inherited = False
                self._connect()
            yield

    def close(self) -> None:
        """Hang up. What has not been acknowledged may or may not be in the log: :meth:`flush` first."""
        with self._lock:
            self._hang_up()
            self._take_answers()
            self._ended = self._ended or f"{self._path}: it was closed"

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def publish(self, route: str, payload: bytes, *, columns: bool = False) -> None:
        """Send lines, each ending in a newline, or one payload of :func:`wald.format.columns.encode`.

        Lines are cut into requests of at most :data:`FRAME_MAX_BYTES`, a longer line goes alone. Returns when they are
        under way; :meth:`acknowledged` tells what is durable.

        Raises:
            InvalidInput: an illegal route, a last line without a newline, a payload the daemon finds too large.
            NotFound: there is no such route.
            Refused: a request was overtaken by another producer with the same id, or this one has ended before.
            NotPermitted: this user may not write to it.
            DiskFailure: the daemon has had too little space for ``retry_for`` seconds.
            Unavailable: no daemon for that long, or one that does not answer.
        """
        check_route(route)
        if not columns and payload[-1:] != b"\n":
            raise InvalidInput(f"route {route}: a payload of lines must end in a newline", hint="append b'\\n'")
        with self._alone():
            for frame in [payload] if columns else _frames(payload):
                self._publish(route, frame, columns)

    def _publish(self, route: str, frame: bytes | memoryview, columns: bool) -> None:
        if len(frame) > REQUEST_MAX_BYTES:
            raise InvalidInput(
                f"route {route}: a record of {len(frame)} bytes; the limit is {REQUEST_MAX_BYTES}",
                hint="write it to the route's FIFO, or split it",
            )
        # The first goes alone: to the daemon a new producer may start at any number, so if it took the second and
        # not the first, the first would come too late.
        while len(self._under_way) >= (WINDOW if self._established else 1):
            self._receive()
        self._number += 1
        request = Publish(route.encode(), len(frame), columns, self._id, self._number)
        self._send(encode_publish(request), frame)

    def flush(self) -> list[Durable]:
        """Wait until everything sent is durable, and return :meth:`acknowledged`; raises as :meth:`publish`."""
        with self._alone():
            self._receive_all()
            return self._take_durable()

    def acknowledged(self) -> list[Durable]:
        """What has become durable since this was last asked, in the order in which it was sent; does not wait."""
        with self._lock:
            self._read_answers()
            self._take_answers()
            return self._take_durable()

    @property
    def unanswered(self) -> int:
        """How many records are sent and not answered; after a failure they may be in the log or not."""
        with self._lock:
            return sum(_records_in(line, payload) for line, payload in self._under_way)

    def wait_for(self, descriptor: int) -> None:
        """Return once ``descriptor`` can be read; meanwhile take acknowledgements, and send lost requests again."""
        with self._alone():
            while not self._is_readable(descriptor):
                self._receive()

    def _is_readable(self, descriptor: int) -> bool:
        """Wait for either: True if ``descriptor`` can be read, False if there is an answer to take."""
        while b"\n" not in self._received:
            deadline = self._give_up_at()
            if self._under_way and self._socket is None:
                self._recover(None, deadline)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if self._under_way and self._socket is not None:
                poller.register(self._socket, select.POLLIN)
            readable = dict(poller.poll(_left(deadline) * 1000 if self._under_way else None))
            if readable:
                return descriptor in readable
            self._recover(TimeoutError(), deadline)
        return False

    def command(self, *words: str) -> str:
        """Send HEAD, STAT, CUT, ROUTE or PING; returns the words of the answer. A lost connection repeats it.

        Raises:
            WaldError: as :meth:`publish`. Whatever was published before is flushed.
        """
        with self._alone():
            self._receive_all()
            self._send(" ".join(words).encode() + b"\n", b"")
            return self._answer()

    def _send(self, line: bytes, payload: bytes | memoryview) -> None:
        deadline = self._give_up_at()
        self._under_way.append((line, payload))
        try:
            self._transmit(line, payload, deadline)
        except OSError as error:
            self._recover(error, deadline)

    def _keep_answers(self) -> ProtocolError | None:
        """Keep what was answered before the connection broke, and what is answered on a new one joins it.

        Returns:
            what the daemon said before it hung up, if it did: that it has no place, say.
        """
        if self._socket is None:
            return None
        self._read_answers()
        lines, self._received = self._received.splitlines(keepends=True), b""
        for line in lines:
            try:
                if line.endswith(b"\n"):
                    parse_reply(line)
                    self._received += line
            except ProtocolError as error:
                return error if error.code in _TRY_AGAIN else None
        return None

    def _read_answers(self) -> None:
        """Read what the daemon has answered, and do not wait for more."""
        if self._socket is None:
            return
        self._socket.setblocking(False)  # with a timeout it would be waited for, MSG_DONTWAIT or not
        with suppress(OSError):
            while part := self._socket.recv(_RECEIVE_BYTES):
                self._received += part

    def _transmit(self, line: bytes, payload: bytes | memoryview, deadline: float) -> None:
        if self._socket is None:
            raise _not_connected()
        self._socket.settimeout(_left(deadline))
        try:
            sent = self._socket.sendmsg([line, payload])
            if sent < len(line):
                self._socket.sendall(line[sent:])
                sent = len(line)
            if sent < len(line) + len(payload):
                self._socket.sendall(memoryview(payload)[sent - len(line) :])
        except OSError:
            raise
        except BaseException:  # a signal's: what is sent next would be taken for the rest of this
            self._read_answers()
            self._hang_up()
            raise

    def _receive(self) -> None:
        first, last = self._answer().split()
        self._established = True
        self._durable.append(Durable(int(first), int(last)))

    def _receive_all(self) -> None:
        while self._under_way:
            self._receive()

    def _take_durable(self) -> list[Durable]:
        durable, self._durable = self._durable, []
        return durable

    def _answer(self) -> str:
        """The answer to the oldest request, which is then forgotten; troubles that pass are sat out."""
        deadline = self._give_up_at()
        while True:
            try:
                words = parse_reply(self._line(deadline))
            except OSError as error:
                self._recover(error, deadline)
            except ProtocolError as error:
                if error.code not in _TRY_AGAIN:
                    self._hang_up()
                    request, _ = self._under_way[0]
                    self._under_way.clear()
                    raise self._end(as_error(error, request, root=self._root, socket=self._path)) from None
                self._hang_up()  # it was the answer to the oldest request, and what follows it is none
                self._received = b""
                self._recover(error, deadline)
            else:
                self._under_way.popleft()
                self._over_it()
                return words

    def _over_it(self) -> None:
        self._deadline, self._pause, self._said = None, _PAUSE_SECONDS, None

    def _end(self, error: WaldError) -> WaldError:
        self._ended = error.message
        return error

    def _give_up_at(self) -> float:
        """When who begins to wait now gives up, on the monotonic clock.

        Raises:
            Refused: it has been given up before, or closed.
        """
        if self._ended:
            raise Refused(
                f"the producer has ended: {self._ended}",
                hint="make another Producer; acknowledged() and unanswered tell what became of this one's records",
            )
        return time.monotonic() + self._retry_for if self._deadline is None else self._deadline

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            if self._socket is None:
                raise _not_connected()
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(_RECEIVE_BYTES)
            if not part:
                raise ConnectionResetError("the daemon hung up")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _recover(self, reason: OSError | ProtocolError | None, deadline: float) -> None:
        """Connect anew and send again what is under way; if all of it was answered, that is left to who sends more."""
        self._deadline = deadline
        while True:
            reason = self._keep_answers() or reason
            self._hang_up()
            if self._under_way and self._received.count(b"\n") == len(self._under_way):
                return
            if isinstance(reason, ProtocolError):
                self._said = reason
            if reason is not None:
                if time.monotonic() >= deadline or isinstance(reason, PermissionError):
                    error = self._given_up(reason)
                    self._take_answers()  # they are durable, though their daemon is given up
                    raise self._end(error)
                time.sleep(min(self._pause, max(0.0, deadline - time.monotonic())))
                self._pause = min(2 * self._pause, _PAUSE_MAX_SECONDS)
            try:
                self._socket = _connect(self._path)
                for line, payload in islice(self._under_way, self._received.count(b"\n"), None):
                    self._transmit(line, payload, deadline)
            except OSError as failure:
                reason = failure
            else:
                return

    def _take_answers(self) -> None:
        """Take what has been read; an error stays for who waits."""
        while self._under_way and _is_publish(self._under_way[0][0]) and _ACKNOWLEDGED.match(self._received):
            self._receive()

    def _given_up(self, reason: OSError | ProtocolError) -> WaldError:
        if isinstance(reason, TimeoutError) and self._said is not None:
            reason = self._said  # the last attempt had only too little time to hear it again
        if isinstance(reason, ProtocolError):
            error = DiskFailure if reason.code is Code.FULL else Unavailable
            return error(f"{self._path}: {reason.code}: {reason.words}", hint=self._look("head"))
        if isinstance(reason, PermissionError):
            return NotPermitted.of(reason, self._path)
        if isinstance(reason, TimeoutError):
            hint = self._look("explain")
            told = _status(self._path)
            if told.get("degraded"):
                numbers = f"{told.get('free_bytes')} bytes are free of {told.get('needed_bytes')} that are needed"
                return DiskFailure(f"{self._path}: the disk is full: {numbers}; the daemon waits for room", hint=hint)
            if told.get("held_requests"):
                return DiskFailure(f"{self._path}: the disk has no room for a request as large as this", hint=hint)
            return Unavailable(f"{self._path}: the daemon does not answer", hint=hint)
        words = reason.strerror or str(reason)
        hint = f"ls -l {self._path}; start the daemon that listens there" if self._root is None else ""
        return Unavailable(
            f"{self._path}: no daemon answers ({words})", hint=hint or command_line(self._root or "", "run")
        )

    def _look(self, words: str) -> str:
        """What shows the state of the disk and of the log."""
        room = f"df -h {self._path.parent}"
        return room if self._root is None else f"{room}; {command_line(self._root, words)}"


def _begin_in_child() -> None:
    for producer in list(_PRODUCERS):
        producer.begin_in_child()


_PRODUCERS: weakref.WeakSet[Producer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begin_in_child)


def _left(deadline: float) -> float:
    return max(_LEAST_SECONDS, deadline - time.monotonic())


def _not_connected() -> OSError:
    return ConnectionResetError("the connection was closed")


def _is_publish(line: bytes) -> bool:
    return line.startswith(b"PUB ")


def _records_in(line: bytes, payload: bytes | memoryview) -> int:
    from wald.format.columns import decode  # only who gives up counts them

    if not _is_publish(line):
        return 0
    request = parse_request(line)
    assert isinstance(request, Publish)
    return decode(memoryview(payload)).count if request.columns else bytes(payload).count(b"\n")


def _frames(payload: bytes) -> Iterator[bytes | memoryview]:
    """Whole lines of ``payload``, as many as fit into a frame, at least one at a time."""
    if len(payload) <= FRAME_MAX_BYTES:
        yield payload
        return
    view, start = memoryview(payload), 0
    while start < len(payload):
        end = payload.rfind(b"\n", start, start + FRAME_MAX_BYTES) + 1 or payload.find(b"\n", start) + 1
        yield view[start:end]
        start = end


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def _status(path: Path) -> dict[str, object]:
    """What the daemon says of itself on another connection; nothing if it does not."""
    try:
        with _connect(path) as connection, connection.makefile("rb") as replies:
            connection.settimeout(_STATUS_SECONDS)
            connection.sendall(b"STAT\n")
            told = json.loads(parse_reply(replies.readline()))
    except (OSError, ValueError, ProtocolError):
        return {}
    return told if isinstance(told, dict) else {}
