"""What the daemon answers over HTTP: ``/metrics`` and ``/healthz``; it only reads the numbers.

Healthy means progress: if input is readable and the head does not move for longer than ``stall_timeout``, the daemon is
not healthy. A log that seals nothing still takes input, so it is degraded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import wald
from wald.daemon.measuring import Measuring
from wald.endpoint import Answer, Pages
from wald.exposition import TEXT_FORMAT, Metric, Samples, counter, gauge, histogram, render
from wald.metrics import Metrics, Outcome
from wald.store.writing.room import Cause

_COUNTERS = {
    "turns": "Rounds of the loop that committed something",
    "records": "Records that became durable",
    "payload_bytes": "Bytes of records that became durable",
    "written_bytes": "Bytes written to segments",
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
    "held_requests": "Requests that were sent and wait for room on the disk",
    "recovery_errors": "What recovery found at the start that no crash explains",
    "fifo_troubles": "FIFOs that cannot be read, and files that were written in place of one",
    "trimmed_bytes": "Bytes of an unfinished write that recovery cut at the start",
}
_HISTOGRAMS = {
    "commit_seconds": "Time that a turn spent in writing and syncing",
    "sync_seconds": "Time of a sync of the active segment",
    "turn_records": "Records of a turn",
    "turn_bytes": "Bytes that a turn wrote",
}


def pages(metrics: Metrics, directory: Measuring, *, stall_timeout: float) -> Pages:
    """What is answered, by path."""

    def exported() -> Answer:
        of_directory = directory.text()  # first: what the daemon counts is as new as can be
        counted = [*of_daemon(metrics), *of_measuring(directory.failures)]
        return Answer(render(counted) + of_directory, content_type=TEXT_FORMAT)

    def healthz() -> Answer:
        status, message = health(metrics, time.monotonic(), stall_timeout)
        return Answer(message.encode() + b"\n", status)

    return {"/metrics": exported, "/healthz": healthz}


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


def of_measuring(failures: int) -> Iterator[Metric]:
    """What the daemon counts about :mod:`wald.daemon.measuring`."""
    yield counter("wald_measurement_failures_total", "How often the directory could not be read", failures)


def of_daemon(metrics: Metrics) -> Iterator[Metric]:
    """What the daemon counts about itself."""
    now = time.monotonic()
    for name, meaning in _COUNTERS.items():
        yield counter(f"wald_{name}_total", meaning, getattr(metrics, name))
    for name, meaning in _GAUGES.items():
        yield gauge(f"wald_{name}", meaning, getattr(metrics, name))
    for name, meaning in _HISTOGRAMS.items():
        yield histogram(f"wald_{name}", meaning, getattr(metrics, name))
    info: Samples = {(metrics.log_id, wald.__version__): 1}
    yield Metric("wald_info", "gauge", "1 for the log that this is, and its wald", ("log", "version"), info)
    causes: Samples = {(cause.value,): float(metrics.degraded_by == cause) for cause in Cause}
    yield Metric("wald_degraded_by", "gauge", "1 for what keeps input from being taken", ("cause",), causes)
    meaning = "Bytes that a group has not read, of a route of which nothing is taken because of its quota"
    yield Metric("wald_route_over_quota_bytes", "gauge", meaning, ("route", "policy"), metrics.over_quota)
    outcomes: Samples = {(outcome.value,): float(metrics.recovery is outcome) for outcome in Outcome}
    yield Metric("wald_recovery", "gauge", "1 for what the recovery of this start has led to", ("outcome",), outcomes)
    yield counter("wald_held_back_seconds_total", "How long input has waited for room", metrics.held_back_seconds(now))
    yield gauge("wald_stalled_seconds", "How long input waits now", metrics.stalled_seconds(now))
    yield gauge(
        "wald_seal_stalled_seconds",
        "How long segments have waited to be sealed while none was",
        metrics.seal_stalled_seconds(now),
    )
