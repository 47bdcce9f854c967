"""An HTTP server for a few pages, such as ``/metrics``, in threads of its own: the daemon's and the sidecars'.

There are few connections at a time, and none for long: the oldest makes way for the next.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from wald.errors import InvalidInput
from wald.exposition import TEXT_FORMAT, Metric, render

_CONNECTIONS_MAX = 8  # scrapers are few, and each takes a thread and a descriptor
_CONNECTION_SECONDS = 10.0  # for question and answer
_PLACE_SECONDS = 1.0  # until the place of a connection that was closed becomes free, on a busy machine
_PAUSE_SECONDS = 0.1  # if there is no descriptor


class _Server(ThreadingHTTPServer):
    """Listens on either family of addresses; a peer that closes its connection early is not reported."""

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._since: dict[socket.socket, float] = {}  # oldest first
        super().__init__((host, port), handler)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_SECONDS)  # no descriptor is left: asking again at once would only burn the processor
            raise

    def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002
        """Whether there is a place for a new connection; the oldest connection is closed for it."""
        assert isinstance(request, socket.socket)
        if not self._places.acquire(blocking=False):
            self._close_oldest(1)
            if not self._places.acquire(timeout=_PLACE_SECONDS):
                return False
        self._since[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Called between connections, twice a second at least."""
        deadline = time.monotonic() - _CONNECTION_SECONDS
        self._close_oldest(sum(since < deadline for since in list(self._since.values())))

    def shutdown_request(self, request: object) -> None:
        """The end of a connection, answered or refused."""
        assert isinstance(request, socket.socket)
        held = self._since.pop(request, None) is not None
        super().shutdown_request(request)
        if held:
            self._places.release()

    def _close_oldest(self, count: int) -> None:
        """End the input of the oldest connections; the thread of each then closes it."""
        for request in list(self._since)[:count]:
            with contextlib.suppress(OSError):  # it has ended by itself
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # handed on as it came


class Answer(NamedTuple):
    """A status and a page."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Answer]]
"""What is answered, by path."""


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    """The handler of the server's requests."""
    unknown = Answer(" or ".join(pages).encode() + b"\n", 404)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self.wfile.write(self._answer())

        def _answer(self) -> bytes:
            """Send the headers; return the body."""
            page = pages.get(self.path.partition("?")[0])
            answer = unknown if page is None else page()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            return answer.body

        def log_message(self, *_: object) -> None:
            """Scrapes are not logged."""

    return Handler


class Endpoint:
    """The server; it has its port from the beginning, and answers after :meth:`start`.

    Args:
        address: ``host:port``.
        setting: where the address was given, as it stands in the message of the error.

    Raises:
        InvalidInput: the address cannot be listened on.
    """

    def __init__(self, address: str, pages: Pages, *, setting: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            if not host or not port.isdecimal():
                raise ValueError("not an address such as 127.0.0.1:9464")
            self._server = _Server(host.strip("[]"), int(port), _handler(pages))
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidInput(f"{setting} {address!r}: {error}", hint='use a free "127.0.0.1:PORT"') from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def serving(address: str | None, collect: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Meanwhile answer ``/metrics`` with what ``collect`` returns then; without an address, nothing is answered.

    Raises:
        InvalidInput: the address cannot be listened on.
    """
    if address is None:
        yield
        return
    pages = {"/metrics": lambda: Answer(render(collect()), content_type=TEXT_FORMAT)}
    endpoint = Endpoint(address, pages, setting="--metrics")
    endpoint.start()
    try:
        yield
    finally:
        endpoint.close()
