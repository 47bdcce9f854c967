"""Metrics that the loop writes, and the pages ``/metrics`` and ``/healthz``.

The daemon is unhealthy if input has waited for ``stall_timeout`` without the head moving. One that cannot seal still
accepts input, so it is only degraded. A separate process, ``wald metrics``, reads the segments' indexes: doing so here
would hold the GIL and block the loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import wald
from wald.exposition import (
    TEXT_FORMAT,
    Histogram,
    Metric,
    Pages,
    Response,
    Samples,
    counter,
    gauge,
    histogram,
    render,
)
from wald.writing.disk_budget import Cause

INTERVAL_SECONDS = 10.0  # minimum between starts of wald metrics
_PAUSE_FACTOR = 9  # minimum pause, as a multiple of the run: a tenth of one core
_FIRST_WAIT_SECONDS = 3.0  # the scraper that starts a run waits for the output
_RUN_TIMEOUT_SECONDS = 600.0
_NICENESS = 5  # with 19 a run would take minutes on a busy machine
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Recovery(StrEnum):
    """Result of the recovery at the start."""

    CLEAN = "clean"
    TRIMMED = "trimmed"  # an unfinished write, left by a crash, was removed
    DAMAGED = "damaged"  # durable bytes are missing or wrong


def _counter(description: str) -> Any:
    return field(default=0, metadata={"metric": lambda name, value: counter(f"{name}_total", description, value)})


def _gauge(description: str, default: float = 0) -> Any:
    return field(default=default, metadata={"metric": lambda name, value: gauge(name, description, value)})


def _histogram(description: str, *bounds: float) -> Any:
    measure = {"metric": lambda name, value: histogram(name, description, value)}
    return field(default_factory=lambda: Histogram(*bounds), metadata=measure)


@dataclass(slots=True)
class Metrics:
    """Numbers of one run; ``*_since`` is a monotonic time, or 0 if nothing waits."""

    commit_rounds: int = _counter("Commit rounds that wrote records")
    records: int = _counter("Durable records")
    payload_bytes: int = _counter("Payload bytes of durable records")
    written_bytes: int = _counter("Bytes written to segments")
    cuts: int = _counter("Segments cut")
    sealed: int = _counter("Segments sealed")
    sealed_bytes: int = _counter("Bytes of sealed segments")
    seal_failures: int = _counter("Failed attempts to seal a segment")
    write_failures: int = _counter("Failed writes and syncs")
    connections_refused: int = _counter("Connections refused, or closed because the client did not read its replies")
    fifos_replaced: int = _counter("FIFOs recreated after they were removed or replaced")
    head_sequence: int = _gauge("Last durable sequence")
    epoch: int = _gauge("Epoch of the daemon")
    connections: int = _gauge("Open connections")
    free_bytes: int = _gauge("Free space under the root when last checked")
    needed_bytes: int = _gauge("Free space needed to accept input")
    degraded: bool = _gauge("1 while the daemon does not accept input because the disk is nearly full", False)
    held_requests: int = _gauge("Requests waiting for disk space")
    recovery_errors: int = _gauge("Errors that recovery found at the start and that a crash does not explain")
    fifo_problems: int = _gauge("Unreadable FIFOs, and files created in place of a FIFO")
    trimmed_bytes: int = _gauge("Bytes of an unfinished write that recovery removed at the start")
    commit_seconds: Histogram = _histogram("Duration of a commit round's writes and syncs", *_SECONDS)  # noqa: RUF009
    sync_seconds: Histogram = _histogram("Duration of a sync of the active segment", *_SECONDS)  # noqa: RUF009
    round_records: Histogram = _histogram("Records per commit round", *(10**power for power in range(7)))  # noqa: RUF009
    round_bytes: Histogram = _histogram("Bytes written per commit round", *(1 << power for power in range(10, 27, 2)))  # noqa: RUF009
    log_id: str = ""
    recovery: Recovery = Recovery.CLEAN
    degraded_by: str = ""  # a Cause
    over_quota: Samples = field(default_factory=dict)  # unread bytes by route and policy
    held_since: float = 0.0  # input waits for disk space
    held_seconds: float = 0.0  # of earlier waits
    waiting_since: float = 0.0  # readable input waits for the head to move
    seal_waits_since: float = 0.0  # segments wait while none is sealed

    def histograms(self) -> dict[str, dict[str, object]]:
        """Return the histograms by name, for ``wald status --latency``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value.to_json() for name, value in values.items() if isinstance(value, Histogram)}

    def track_disk_wait(self, now: float, *, is_waiting: bool) -> None:
        if is_waiting:
            self.held_since = self.held_since or now
        elif self.held_since:
            self.held_seconds += now - self.held_since
            self.held_since = 0.0


def elapsed(since: float, now: float) -> float:
    """Return the seconds since a ``*_since`` time, or 0.

    The caller passes the value, because the loop may change the attribute between reads.
    """
    return max(0.0, now - since) if since else 0.0


def pages(metrics: Metrics, process: MetricsProcess, *, stall_timeout: float) -> Pages:
    def metrics_page() -> Response:
        log_metrics = process.text()  # first, so that the daemon's numbers are the newest
        return Response(render(daemon_metrics(metrics, process.failures)) + log_metrics, content_type=TEXT_FORMAT)

    def health_page() -> Response:
        status, message = health(metrics, time.monotonic(), stall_timeout)
        return Response(message.encode() + b"\n", status)

    return {"/metrics": metrics_page, "/healthz": health_page}


def health(metrics: Metrics, now: float, stall_timeout: float) -> tuple[int, str]:
    """Return the HTTP status and the message of ``/healthz``."""
    stalled = elapsed(metrics.waiting_since, now)
    if stalled > stall_timeout:
        return 503, f"stalled: input has waited for {stalled:.0f} s; the head is at {metrics.head_sequence}"
    seal_stalled = elapsed(metrics.seal_waits_since, now)
    if seal_stalled > stall_timeout:
        failures = f"{metrics.seal_failures} attempts failed"
        return 200, f"degraded: no segment has been sealed for {seal_stalled:.0f} s, although some wait ({failures})"
    if metrics.degraded:
        numbers = f"{metrics.free_bytes} bytes are free, {metrics.needed_bytes} are needed"
        return 200, f"degraded: input is not accepted: {numbers} ({metrics.degraded_by})"
    return 200, f"ok: head {metrics.head_sequence}"


def daemon_metrics(metrics: Metrics, failures: int) -> Iterator[Metric]:
    """Yield the daemon's metrics, including the ``failures`` of :class:`MetricsProcess`."""
    now = time.monotonic()
    for each in fields(metrics):
        if each.metadata:
            yield each.metadata["metric"](f"wald_{each.name}", getattr(metrics, each.name))
    info: Samples = {(metrics.log_id, wald.__version__): 1}
    yield Metric("wald_info", "gauge", "Identity of the log and version of wald; always 1", ("log", "version"), info)
    causes: Samples = {(cause.value,): float(metrics.degraded_by == cause) for cause in Cause}
    yield Metric("wald_degraded_by", "gauge", "1 for the cause that makes input wait", ("cause",), causes)
    description = "Payload bytes that a consumer group has not read, for routes whose quota blocks input"
    yield Metric("wald_route_over_quota_bytes", "gauge", description, ("route", "policy"), metrics.over_quota)
    results: Samples = {(result.value,): float(metrics.recovery is result) for result in Recovery}
    yield Metric("wald_recovery", "gauge", "1 for the result of recovery at the start", ("outcome",), results)
    held = metrics.held_seconds + elapsed(metrics.held_since, now)
    yield counter("wald_disk_wait_seconds_total", "Time that input has waited for disk space", held)
    stalled = elapsed(metrics.waiting_since, now)
    yield gauge("wald_stalled_seconds", "Time that readable input has waited for the head to move", stalled)
    description = "Time that segments have waited without any of them being sealed"
    yield gauge("wald_seal_stalled_seconds", description, elapsed(metrics.seal_waits_since, now))
    description = "Failed runs of wald metrics, which reads the log directory"
    yield counter("wald_measurement_failures_total", description, failures)


class MetricsProcess:
    """Runner of ``wald metrics`` that caches its output."""

    def __init__(self, root: Path, needed_bytes: Callable[[], int]) -> None:
        self._root = root
        self._needed_bytes = needed_bytes
        self._mutex = threading.Lock()
        self._next_run_at = 0.0  # monotonic time before which the output is reused
        self._text = b""
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.failures = 0

    def text(self) -> bytes:
        """Start a run if one is due; return the last output, empty at first and after a failure."""
        with self._mutex:
            is_running = self._thread is not None and self._thread.is_alive()
            must_start = not is_running and not self._is_closed and time.monotonic() >= self._next_run_at
            if must_start:
                self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
                self._thread.start()
        if must_start and self._thread is not None:
            self._thread.join(_FIRST_WAIT_SECONDS)  # only this scraper waits: waiting scrapers hold connections
        return self._text

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._text = self._output()
        except (OSError, subprocess.SubprocessError):
            self._text = b""  # old numbers would hide the failure
            self.failures += 1
        end = time.monotonic()
        self._next_run_at = max(start + INTERVAL_SECONDS, end + _PAUSE_FACTOR * (end - start))

    def _output(self) -> bytes:
        # -P: no module is imported from the working directory, which may be the root.
        command = [sys.executable, "-P", "-m", "wald", "--root", str(self._root), "metrics"]
        command += ["--needed-bytes", str(self._needed_bytes())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with process:
            with self._mutex:
                self._process = process
                if self._is_closed:
                    process.kill()
            with contextlib.suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            try:
                output, _ = process.communicate(timeout=_RUN_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        return output
