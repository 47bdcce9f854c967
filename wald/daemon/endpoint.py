"""``/metrics`` and ``/healthz`` over HTTP; reads numbers, asks nobody.

Healthy means progress: readable input while the head stands still for longer than ``stall_timeout`` is not.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from wald.errors import InvalidInput
from wald.metrics import Metrics
from wald.store.room import Cause

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
    "seal_failures": "Reasons for which a segment could not be sealed, each counted once",
    "write_failures": "Writes or syncs that failed",
}
_GAUGES = {
    "head_sequence": "The last durable sequence",
    "epoch": "The number of this life of the daemon",
    "connections": "Open connections",
    "free_bytes": "Free space under the root when last looked at",
    "needed_bytes": "How much of it has to be free for input to be taken",
    "degraded": "1 while input is not taken because the disk is nearly full",
    "recovery_errors": "What recovery found at the start that no crash explains",
    "trimmed_bytes": "Bytes of an unfinished write that recovery cut at the start",
}


class _Server(ThreadingHTTPServer):
    """Listens on either family of addresses; a peer that hangs up in the middle is no event."""

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # handed on as it came


class Endpoint:
    """The HTTP server, in threads of its own.

    Args:
        address: ``host:port``.

    Raises:
        InvalidInput: the address cannot be listened on.
    """

    def __init__(self, address: str, metrics: Metrics, *, stall_timeout: float) -> None:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collector(metrics))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")
                elif self.path == "/healthz":
                    status, words = health(metrics, time.monotonic(), stall_timeout)
                    self._answer(status, words.encode() + b"\n", "text/plain; charset=utf-8")
                else:
                    self._answer(404, b"/metrics or /healthz\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not events."""

        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidInput(f"metrics = {address!r}: {error}", hint='use a free "127.0.0.1:PORT"') from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def health(metrics: Metrics, now: float, stall_timeout: float) -> tuple[int, str]:
    """HTTP status and words."""
    stalled = metrics.stalled_seconds(now)
    if stalled > stall_timeout:
        return (
            503,
            f"stalled: input waits for {stalled:.0f} s, the head stands at {metrics.head_sequence}",
        )
    if metrics.degraded:
        numbers = f"{metrics.free_bytes} bytes free of {metrics.needed_bytes} needed"
        return 200, f"degraded: {numbers}, input is not taken ({metrics.degraded_by})"
    return 200, f"ok: head {metrics.head_sequence}"


class _Collector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"wald_{name}", words, getattr(self._metrics, name))
        for name, words in _GAUGES.items():
            yield GaugeMetricFamily(f"wald_{name}", words, float(getattr(self._metrics, name)))
        family = GaugeMetricFamily("wald_degraded_by", "1 for what keeps input from being taken", labels=["cause"])
        for cause in Cause:
            family.add_metric([cause], float(self._metrics.degraded_by == cause))
        yield family
