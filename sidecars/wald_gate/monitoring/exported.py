"""The numbers of a gate as metrics."""

from __future__ import annotations

from collections.abc import Iterator

import wald
from wald.exposition import Metric, Samples, counter, gauge, histogram
from wald_gate.monitoring.counts import Counts, Published
from wald_gate.monitoring.readiness import Word
from wald_gate.transport.connection import Bounds, Ended

_COUNTERS = {
    "stored_records": "Records stored for clients",
    "stored_bytes": "Payload bytes of requests to the daemon",
    "sent_records": "Records sent to clients",
    "sent_bytes": "Bytes of responses with records",
    "broken_answers": "Responses aborted by an error after they had started",
}


def of_gate(
    counts: Counts, bounds: Bounds, published: Published, word: Word, log_id: str, *, groups: int, leases: int
) -> Iterator[Metric]:
    """Yield copies of the metrics of ``wald-gate``, so that another thread may render them.

    Args:
        groups: number of open groups.
        leases: number of waiting leases.
    """
    requests: Samples = {
        (verb, str(status)): number
        for verb, each in counts.answered.items()
        for status, number in each.statuses.items()
    }
    meaning = 'Requests answered; the verb "none" is an unknown path or method'
    yield Metric("wald_gate_requests_total", "counter", meaning, ("verb", "status"), requests)
    durations: Samples = {(verb,): each.seconds.copy() for verb, each in counts.answered.items()}
    meaning = "Time from a request to the start of its response"
    yield Metric("wald_gate_request_seconds", "histogram", meaning, ("verb",), durations)
    for name, meaning in _COUNTERS.items():
        yield counter(f"wald_gate_{name}_total", meaning, getattr(counts, name))
    yield gauge("wald_gate_streams", "Open responses that continue with records appended later", counts.streams)
    yield gauge("wald_gate_groups", "Work groups that the gate owns", groups)
    yield gauge("wald_gate_waiting_leases", "Lease requests that wait for a record", leases)
    meaning = "Time until the records of a request to the daemon are durable, or the gate gives up"
    yield histogram("wald_gate_publish_seconds", meaning, published.seconds.copy())
    meaning = "Requests to the daemon retried after a restart or a full disk"
    yield counter("wald_gate_repeated_requests_total", meaning, published.repeated)
    handshakes = bounds.count - len(bounds.open)
    idle = max(0, len(bounds.idle) - handshakes)
    connections: Samples = {
        ("idle",): idle,
        ("busy",): len(bounds.open) - idle,
        ("handshake",): handshakes,
    }
    yield Metric("wald_gate_connections", "gauge", "Open connections", ("state",), connections)
    meaning = "Connections that the gate closed, by reason"
    ended: Samples = {(reason.value,): bounds.ended[reason] for reason in Ended}
    yield Metric("wald_gate_connections_ended_total", "counter", meaning, ("reason",), ended)
    expiries: Samples = {(file,): at for file, at in counts.expiries.items()}
    meaning = "Earliest expiry of the certificates in a file of server certificates or client CAs"
    labels = ("file",)
    yield Metric("wald_gate_certificate_expiry_timestamp_seconds", "gauge", meaning, labels, expiries)
    meaning = "1 if the log is readable and its daemon responds"
    yield gauge("wald_gate_ready", meaning, float(word is not Word.NOT_READY))
    info: Samples = {(log_id, wald.__version__): 1}
    meaning = "Identity of the log and version of wald; always 1"
    yield Metric("wald_gate_info", "gauge", meaning, ("log", "version"), info)
