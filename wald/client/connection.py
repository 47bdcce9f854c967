"""Connection to the daemon's socket: connect, send whole requests, read answers line by line.

Errors are those of the operating system; :mod:`wald.client.session` decides which are temporary.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from wald.format.protocol import ProtocolError, parse_reply

_PATH_MAX_BYTES = 107  # limit of a socket address
_RECEIVE_BYTES = 64 << 10
_LEAST_SECONDS = 0.001  # so that a received answer is read even after the deadline
_STATUS_SECONDS = 1.0


class Connection:
    """Connection to the socket at ``path``, initially closed; can be reopened.

    Attributes:
        received: bytes read and not yet parsed; they survive the connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = b""
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        return self._require().fileno()

    def open(self) -> None:
        self._socket = connect(self.path)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, line: bytes, payload: bytes | memoryview, deadline: float) -> None:
        """Send one request; raise OSError if the connection is closed or broken, or the deadline has passed."""
        connection = self._require()
        connection.settimeout(seconds_until(deadline))
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
            self.read_available()
            self.close()
            raise

    def read_line(self, deadline: float) -> bytes:
        """Wait for the next line of an answer; raise OSError as :meth:`send`."""
        while b"\n" not in self.received:
            connection = self._require()
            connection.settimeout(seconds_until(deadline))
            part = connection.recv(_RECEIVE_BYTES)
            if not part:
                raise ConnectionResetError("the daemon hung up")
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        return line

    def read_available(self) -> None:
        """Read received bytes without waiting for more."""
        if self._socket is None:
            return
        self._socket.setblocking(False)  # with a timeout, recv would wait despite MSG_DONTWAIT
        with suppress(OSError):
            while part := self._socket.recv(_RECEIVE_BYTES):
                self.received += part

    def _require(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("the connection was closed")
        return self._socket


def connect(path: Path, *, seconds: float | None = None) -> socket.socket:
    """Return a socket connected to ``path``, which may be longer than a socket address; ``seconds`` is its timeout."""
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
    """Return the result of :func:`ask_status`; empty without an answer."""
    try:
        return ask_status(path, seconds=_STATUS_SECONDS)
    except OSError:
        return {}


def ask_status(path: Path, *, seconds: float) -> dict[str, object]:
    """Return the daemon's answer to STAT on a new connection; empty if the answer is invalid.

    Raises:
        TimeoutError: no answer within ``seconds``.
        OSError: nothing listens there, or this user may not connect.
    """
    try:
        with connect(path, seconds=seconds) as connection, connection.makefile("rb") as replies:
            connection.sendall(b"STAT\n")
            answer = json.loads(parse_reply(replies.readline()))
    except (ValueError, ProtocolError):
        return {}
    return answer if isinstance(answer, dict) else {}


def seconds_until(deadline: float) -> float:
    return max(_LEAST_SECONDS, deadline - time.monotonic())
