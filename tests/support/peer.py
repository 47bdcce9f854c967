"""A socket that gives producers scripted answers."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from wald.format.protocol import Publish, parse_request

Answer = Callable[[int, Publish], bytes | None]
"""The number of a request and the request → the reply; b"" hangs up, None waits."""

Answering = Callable[[Answer], Path]
"""Makes a peer that answers so; returns its socket's path."""


class Peer:
    """A server in place of a daemon, with scripted answers; leaving a ``with`` block closes it."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._count = 0
        self._answer = answer
        self.hung_up = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # a producer may leave without waiting for its answers
                self._talk(connection)
            self.hung_up.set()

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            for line in stream:
                request = parse_request(line)
                if not isinstance(request, Publish):  # a client that gives up asks for the state, which is not recorded
                    return
                stream.read(request.payload_bytes)
                self._count += 1
                reply = self._answer(self._count, request)
                if reply == b"":
                    return
                if reply is not None:
                    connection.sendall(reply)


def ok(request: Publish) -> bytes:
    return b"OK %d %d\n" % (request.producer_sequence, request.producer_sequence)
