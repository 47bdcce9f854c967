"""What the daemon counts about itself: plain numbers, written by the loop and read by the endpoint and STAT.

Units are in the names: bytes, records, seconds. Counters only grow; the others are set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from wald.exposition import Histogram, Samples

_KIB = 1 << 10


class Outcome(StrEnum):
    """What the recovery of a start has led to."""

    CLEAN = "clean"
    TRIMMED = "trimmed"
    """An unfinished write was cut off, as a crash leaves it behind."""
    DAMAGED = "damaged"
    """Bytes that were durable are missing or wrong."""


def _seconds() -> Histogram:
    """From a fast disk to one that hangs."""
    return Histogram(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


@dataclass(slots=True)
class Metrics:
    """The numbers of one life of the daemon.

    Attributes:
        log_id: of the log, as text.
        turn_bytes: written by each turn; ``turn_records``: in each.
        sync_seconds: of the active segment; ``commit_seconds``: the same with the write, the head and the sources.
        free_bytes: free space under the root when it was last read.
        needed_bytes: with less free space than this input waits.
        degraded: whether input waits for room.
        degraded_by: why it does, as a :class:`Cause`; "" while it does not.
        held_requests: how many requests that were sent wait for room; unless degraded, others are taken meanwhile.
        over_quota: unread bytes of each route of which nothing is taken because of its quota, by route and policy.
        held_since: since when input has been waiting for room; 0: none waits. ``held_seconds``: before that.
        waiting_since: since when readable input has been waiting for the head to move; 0: none waits.
        seal_waits_since: since when segments have been waiting and none was sealed; 0: none waits.
    """

    log_id: str = ""
    turns: int = 0
    records: int = 0
    payload_bytes: int = 0
    written_bytes: int = 0
    commit_seconds: Histogram = field(default_factory=_seconds)
    sync_seconds: Histogram = field(default_factory=_seconds)
    turn_records: Histogram = field(default_factory=lambda: Histogram(*(10**power for power in range(7))))
    turn_bytes: Histogram = field(default_factory=lambda: Histogram(*(_KIB << 2 * power for power in range(9))))
    cuts: int = 0
    sealed: int = 0
    sealed_bytes: int = 0
    seal_failures: int = 0
    write_failures: int = 0
    recovery: Outcome = Outcome.CLEAN
    recovery_errors: int = 0
    trimmed_bytes: int = 0
    fifos_replaced: int = 0
    fifo_troubles: int = 0
    head_sequence: int = 0
    epoch: int = 0
    connections: int = 0
    connections_refused: int = 0
    free_bytes: int = 0
    needed_bytes: int = 0
    degraded: bool = False
    degraded_by: str = ""
    held_requests: int = 0
    over_quota: Samples = field(default_factory=dict)
    held_since: float = 0.0
    held_seconds: float = 0.0
    waiting_since: float = 0.0
    seal_waits_since: float = 0.0

    def histograms(self) -> dict[str, dict[str, object]]:
        """What wald latency is made of, by the names here."""
        names = ("commit_seconds", "sync_seconds", "turn_records", "turn_bytes")
        return {name: getattr(self, name).to_json() for name in names}

    def hold(self, now: float, *, waits: bool) -> None:
        """Note whether input waits for room."""
        if waits:
            self.held_since = self.held_since or now
        elif self.held_since:
            self.held_seconds += now - self.held_since
            self.held_since = 0.0

    def held_back_seconds(self, now: float) -> float:
        """How long input has waited for room, now and before."""
        since = self.held_since  # written by another thread
        return self.held_seconds + (now - since if since else 0.0)

    def stalled_seconds(self, now: float) -> float:
        """How long input has been readable without the head moving."""
        since = self.waiting_since  # written by another thread
        return max(0.0, now - since) if since else 0.0

    def seal_stalled_seconds(self, now: float) -> float:
        """How long there has been something to seal without anything being sealed."""
        since = self.seal_waits_since  # written by another thread
        return now - since if since else 0.0
