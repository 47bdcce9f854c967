"""What the daemon counts about itself: plain numbers, written by the loop and read by the endpoint and STAT.

Units are in the names: bytes, records, seconds. Counters only grow; the others are set.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metrics:
    """The numbers of one life of the daemon.

    Attributes:
        free_bytes: free space under the root when it was last read.
        needed_bytes: with less free space than this input waits.
        degraded: whether input waits for room.
        degraded_by: why it does, as a :class:`Cause`; "" while it does not.
        held_requests: how many requests wait for room; unless degraded, others are taken meanwhile.
        waiting_since: since when readable input has been waiting for the head to move; 0: none waits.
        seal_waits_since: since when segments have been waiting and none was sealed; 0: none waits.
    """

    turns: int = 0
    records: int = 0
    payload_bytes: int = 0
    written_bytes: int = 0
    commit_seconds: float = 0.0
    cuts: int = 0
    sealed: int = 0
    sealed_bytes: int = 0
    seal_failures: int = 0
    write_failures: int = 0
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
    waiting_since: float = 0.0
    seal_waits_since: float = 0.0

    def stalled_seconds(self, now: float) -> float:
        """How long input has been readable without the head moving."""
        return now - self.waiting_since if self.waiting_since else 0.0

    def seal_stalled_seconds(self, now: float) -> float:
        """How long there has been something to seal without anything being sealed."""
        since = self.seal_waits_since  # written by another thread
        return now - since if since else 0.0
