"""Prometheus counters, gauges and histograms, their text format 0.0.4, and an HTTP server for them.

A program counts in plain numbers and converts them to :class:`Metric` objects for each scrape.

The server limits connections and their duration; if all are in use, it closes the oldest. Importing
``http.server`` instead would take as long as starting Python.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

from wald.errors import InvalidInput

if TYPE_CHECKING:
    import prometheus_client

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_CONNECTIONS_MAX = 8  # scrapers are few, and each takes a thread and a descriptor
_CONNECTION_SECONDS = 10.0  # for request and response
_CLOSING_SECONDS = 1.0  # for the thread of a closed connection to end, on a busy machine
_RETRY_SECONDS = 0.1  # if the process has no free descriptor
_LINE_MAX = 8 << 10
_HEADERS_MAX = 100


class Histogram:
    """Counts of values by range. ``bounds`` are the ascending upper limits of all ranges but the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        """Return a snapshot for another thread."""
        snapshot = Histogram(*self.bounds)
        snapshot.counts, snapshot.sum = self.counts.copy(), self.sum
        return snapshot

    def to_json(self) -> dict[str, object]:
        return {"bounds": self.bounds, "counts": self.counts, "sum": self.sum}


Samples = dict[tuple[str, ...], float | Histogram]
"""Values of a metric; each key is a tuple of label values, in order."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its current values."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    samples: Samples = field(default_factory=dict)


def counter(name: str, meaning: str, value: float) -> Metric:
    return Metric(name, "counter", meaning, (), {(): value})


def gauge(name: str, meaning: str, value: float) -> Metric:
    return Metric(name, "gauge", meaning, (), {(): value})


def histogram(name: str, meaning: str, value: Histogram) -> Metric:
    return Metric(name, "histogram", meaning, (), {(): value})


def render(metrics: Iterable[Metric]) -> bytes:
    import prometheus_client

    families = [_family(each) for each in metrics if each.samples]
    return prometheus_client.generate_latest(SimpleNamespace(collect=families.__iter__))


def _family(metric: Metric) -> prometheus_client.Metric:
    import prometheus_client

    family = prometheus_client.Metric(metric.name.removesuffix("_total"), metric.meaning, metric.type)
    for values, value in metric.samples.items():
        # A group's name may contain any bytes that a file name may.
        escaped = (text.encode(errors="backslashreplace").decode() for text in values)
        labels = dict(zip(metric.labels, escaped, strict=True))
        if not isinstance(value, Histogram):
            family.add_sample(metric.name, labels, value)
            continue
        totals = list(accumulate(value.counts))  # computed once: another thread may be adding values
        for bound, total in zip((*(f"{bound:g}" for bound in value.bounds), "+Inf"), totals, strict=True):
            family.add_sample(f"{metric.name}_bucket", labels | {"le": bound}, total)
        family.add_sample(f"{metric.name}_sum", labels, value.sum)
        family.add_sample(f"{metric.name}_count", labels, totals[-1])
    return family


class Response(NamedTuple):
    """HTTP response."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Response]]
"""Functions that return the response, by path."""


@contextlib.contextmanager
def serving(address: str | None, collect: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Serve ``/metrics`` from ``collect`` while the block runs; without an address, serve nothing."""
    if address is None:
        yield
        return
    pages = {"/metrics": lambda: Response(render(collect()), content_type=TEXT_FORMAT)}
    with contextlib.closing(Endpoint(address, pages, setting="--metrics")) as endpoint:
        endpoint.start()
        yield


class Endpoint(ThreadingTCPServer):
    """HTTP server in its own threads; listens at once, or raises InvalidInput; answers after :meth:`start`."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, pages: Pages, *, setting: str) -> None:
        host, _, port = address.rpartition(":")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        self._slots = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._since: dict[socket.socket, float] = {}  # oldest first
        self._thread = threading.Thread(target=self.serve_forever, name="endpoint", daemon=True)
        try:
            if not host or not port.isdecimal():
                raise ValueError("not an address such as 127.0.0.1:9464")
            super().__init__((host.strip("[]"), int(port)), _Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidInput(f"{setting} {address!r}: {error}", case="address-is-not-free") from error

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_RETRY_SECONDS)  # without a free descriptor, a retry at once only uses the processor
            raise

    def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002
        """Assign a slot to the connection, if necessary the slot of the oldest one."""
        assert isinstance(request, socket.socket)
        if not self._slots.acquire(blocking=False):
            self._close_oldest(1)
            if not self._slots.acquire(timeout=_CLOSING_SECONDS):
                return False
        self._since[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Close connections that have lasted too long; the base class calls this twice a second."""
        deadline = time.monotonic() - _CONNECTION_SECONDS
        self._close_oldest(sum(since < deadline for since in list(self._since.values())))

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        has_slot = self._since.pop(request, None) is not None
        super().shutdown_request(request)
        if has_slot:
            self._slots.release()

    def _close_oldest(self, count: int) -> None:
        for request in list(self._since)[:count]:
            with contextlib.suppress(OSError):  # the connection has ended
                request.shutdown(socket.SHUT_RDWR)  # the connection's thread closes the socket

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may close its connection early
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # passed through unchanged


class _Handler(StreamRequestHandler):
    """Handler of one HTTP/1.0 request, whose body is not read."""

    server: Endpoint

    def handle(self) -> None:
        words = self.rfile.readline(_LINE_MAX).decode("latin-1").split()
        if not words:
            return
        for _ in range(_HEADERS_MAX):
            if not self.rfile.readline(_LINE_MAX).strip():
                break
        from http import HTTPStatus  # takes as long to import as this module

        response = self._response(words)
        head = (
            f"HTTP/1.0 {response.status} {HTTPStatus(response.status).phrase}\r\n"
            f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}\r\n\r\n"
        )
        self.wfile.write(head.encode() + (b"" if words[0] == "HEAD" else response.body))

    def _response(self, words: list[str]) -> Response:
        if len(words) != 3:
            return Response(b"bad request\n", 400)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return Response(b"only GET and HEAD are supported\n", 501)
        page = self.server.pages.get(target.partition("?")[0])
        return Response(" or ".join(self.server.pages).encode() + b"\n", 404) if page is None else page()
