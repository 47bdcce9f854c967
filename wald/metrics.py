"""What the daemon counts about itself; plain numbers, written by the loop and read by whoever asks.

Units are in the names: bytes, records, seconds. Counters only grow; the others are set.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metrics:
    """The numbers of one life of the daemon.

    Attributes:
        free_bytes: under the root when last looked at.
        needed_bytes: of them with less than this input waits.
        degraded_by: why it does, as :class:`Cause` has it; "" while it does not.
        held_requests: how many wait for room; others are taken meanwhile, unless it is degraded.
        waiting_since: since when something readable has been waiting for the head to move; 0: nothing is.
        seal_waits_since: since when there has been something to seal and nothing was; 0: there is nothing.
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
        since = self.seal_waits_since  # another thread's
        return now - since if since else 0.0
