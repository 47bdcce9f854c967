"""``/metrics`` and ``/healthz`` over HTTP; it only reads the metrics.

Healthy means progress: if input is readable and the head does not move for longer than ``stall_timeout``, the daemon is
not healthy. A log that seals nothing still takes input, so it is degraded. There are few connections at a time, and
none for long: the oldest makes way for the next.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from wald.errors import InvalidInput
from wald.metrics import Metrics
from wald.store.writing.room import Cause

if TYPE_CHECKING:
    from prometheus_client import Metric

_COUNTERS = {
    "turns": "Rounds of the loop that committed something",
    "records": "Records that became durable",
    "payload_bytes": "Bytes of records that became durable",
    "written_bytes": "Bytes written to segments",
    "commit_seconds": "Time spent in writing and syncing",
    "cuts": "Segments cut",
    "sealed": "Segments sealed",
    "sealed_bytes": "Bytes of sealed segments",
    "seal_failures": "Attempts to seal a segment that failed",
    "write_failures": "Writes or syncs that failed",
    "connections_refused": "Connections that found no place, or lost theirs because replies were not read",
    "fifos_replaced": "FIFOs that were removed or replaced, and were made anew",
}
_GAUGES = {
    "head_sequence": "The last durable sequence",
    "epoch": "The number of this life of the daemon",
    "connections": "Open connections",
    "free_bytes": "Free space under the root when it was last read",
    "needed_bytes": "How much of it has to be free for input to be taken",
    "degraded": "1 while input is not taken because the disk is nearly full",
    "held_requests": "Requests that wait for room on the disk",
    "recovery_errors": "What recovery found at the start that no crash explains",
    "fifo_troubles": "FIFOs that cannot be read, and files that were written in place of one",
    "trimmed_bytes": "Bytes of an unfinished write that recovery cut at the start",
}


_CONNECTIONS_MAX = 8  # scrapers are few, and each takes a thread and a descriptor
_CONNECTION_SECONDS = 10.0  # for question and answer
_PAUSE_SECONDS = 0.1  # if there is no descriptor, or no place becomes free


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
            if not self._places.acquire(timeout=_PAUSE_SECONDS):
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


def _handler(metrics: Metrics, stall_timeout: float) -> type[BaseHTTPRequestHandler]:
    """The handler of the server's requests."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(metrics))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/healthz":
                status, message = health(metrics, time.monotonic(), stall_timeout)
                self._answer(status, message.encode() + b"\n", "text/plain; charset=utf-8")
            else:
                self._answer(404, b"/metrics or /healthz\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not logged."""

    return Handler


class Endpoint:
    """The HTTP server, in its own threads; it has its port from the beginning, and answers after :meth:`start`.

    Args:
        address: ``host:port``.

    Raises:
        InvalidInput: the address cannot be listened on.
    """

    def __init__(self, address: str, metrics: Metrics, *, stall_timeout: float) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), _handler(metrics, stall_timeout))
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidInput(f"metrics = {address!r}: {error}", hint='use a free "127.0.0.1:PORT"') from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def health(metrics: Metrics, now: float, stall_timeout: float) -> tuple[int, str]:
    """HTTP status and message."""
    stalled = metrics.stalled_seconds(now)
    if stalled > stall_timeout:
        return (
            503,
            f"stalled: input waits for {stalled:.0f} s, the head stands at {metrics.head_sequence}",
        )
    seal_stalled = metrics.seal_stalled_seconds(now)
    if seal_stalled > stall_timeout:
        failures = f"{metrics.seal_failures} attempts failed"
        return 200, f"degraded: segments wait to be sealed, none was for {seal_stalled:.0f} s ({failures})"
    if metrics.degraded:
        numbers = f"{metrics.free_bytes} bytes free of {metrics.needed_bytes} needed"
        return 200, f"degraded: {numbers}, input is not taken ({metrics.degraded_by})"
    return 200, f"ok: head {metrics.head_sequence}"


class _Collector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"wald_{name}", meaning, getattr(self._metrics, name))
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(f"wald_{name}", meaning, float(getattr(self._metrics, name)))
        family = GaugeMetricFamily("wald_degraded_by", "1 for what keeps input from being taken", labels=["cause"])
        for cause in Cause:
            family.add_metric([cause], float(self._metrics.degraded_by == cause))
        yield family
        meaning = "How long segments have waited to be sealed while none was"
        stalled = self._metrics.seal_stalled_seconds(time.monotonic())
        yield GaugeMetricFamily("wald_seal_stalled_seconds", meaning, stalled)
