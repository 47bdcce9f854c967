"""The numbers of a gate as metrics."""

from __future__ import annotations

from collections.abc import Iterator

import wald
from wald.exposition import Metric, Samples, counter, gauge, histogram
from wald_gate.monitoring.counts import Counts, Published
from wald_gate.monitoring.readiness import Word
from wald_gate.transport.connection import Bounds, Ended

_COUNTERS = {
    "stored_records": "Records that were stored for clients",
    "stored_bytes": "Bytes of them, as they went to the daemon",
    "sent_records": "Records that were sent to clients",
    "sent_bytes": "Bytes of the answers that have them",
    "broken_answers": "Answers that had begun, and were broken off as something went wrong",
}


def of_gate(
    counts: Counts, bounds: Bounds, published: Published, word: Word, log_id: str, *, groups: int, leases: int
) -> Iterator[Metric]:
    """The metrics of ``wald-gate``; each is a copy, so that another thread may write the text.

    Args:
        groups: that are open; ``leases``: that wait.
    """
    requests: Samples = {
        (verb, str(status)): number
        for verb, each in counts.answered.items()
        for status, number in each.statuses.items()
    }
    meaning = 'Requests that were answered; the verb "none" is a path or a method that there is not'
    yield Metric("wald_gate_requests_total", "counter", meaning, ("verb", "status"), requests)
    durations: Samples = {(verb,): each.seconds.copy() for verb, each in counts.answered.items()}
    meaning = "Time until the answer to a request began"
    yield Metric("wald_gate_request_seconds", "histogram", meaning, ("verb",), durations)
    for name, meaning in _COUNTERS.items():
        yield counter(f"wald_gate_{name}_total", meaning, getattr(counts, name))
    yield gauge("wald_gate_streams", "Answers under way that go on with what is appended later", counts.streams)
    yield gauge("wald_gate_groups", "Work groups that the gate owns now", groups)
    yield gauge("wald_gate_waiting_leases", "Requests of workers that wait for a record", leases)
    meaning = "Time from a request to the daemon until its records were on disk, or until it was given up"
    yield histogram("wald_gate_publish_seconds", meaning, published.seconds.copy())
    meaning = "Requests that were sent to the daemon again, as it was restarted or had no room"
    yield counter("wald_gate_repeated_requests_total", meaning, published.repeated)
    handshakes = bounds.count - len(bounds.open)
    idle = max(0, len(bounds.idle) - handshakes)
    connections: Samples = {
        ("idle",): idle,
        ("busy",): len(bounds.open) - idle,
        ("handshake",): handshakes,
    }
    yield Metric("wald_gate_connections", "gauge", "Open connections", ("state",), connections)
    meaning = "Connections that the gate has ended, by the reason"
    ended: Samples = {(reason.value,): bounds.ended[reason] for reason in Ended}
    yield Metric("wald_gate_connections_ended_total", "counter", meaning, ("reason",), ended)
    expiries: Samples = {(file,): at for file, at in counts.expiries.items()}
    meaning = "When the first certificate in a file expires, that is served or that of clients have to descend from"
    labels = ("file",)
    yield Metric("wald_gate_certificate_expiry_timestamp_seconds", "gauge", meaning, labels, expiries)
    meaning = "1 if the log can be read and its daemon answers"
    yield gauge("wald_gate_ready", meaning, float(word is not Word.NOT_READY))
    info: Samples = {(log_id, wald.__version__): 1}
    meaning = "1 for the log that is served, and the wald of the gate"
    yield Metric("wald_gate_info", "gauge", meaning, ("log", "version"), info)
