"""What the gate counts about itself: plain numbers, which its event loop alone changes.

Units are in the names: bytes, records, seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from wald.exposition import Histogram


def seconds() -> Histogram:
    """From an answer out of memory to a long poll."""
    return Histogram(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(slots=True)
class Answered:
    """The answers of one verb.

    Attributes:
        statuses: how many had which status.
        seconds: until the answer began.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=seconds)

    def count(self, status: int, duration: float) -> None:
        """Count an answer; takes about 0.4 µs."""
        self.statuses[status] += 1
        self.seconds.observe(duration)


@dataclass(slots=True)
class Published:
    """What was sent to the daemon.

    Attributes:
        seconds: until records were on disk, or nothing more was tried.
        repeated: requests that were sent again, as the connection was lost or the daemon could not do it then.
    """

    seconds: Histogram = field(default_factory=seconds)
    repeated: int = 0


@dataclass(slots=True)
class Counts:
    """The numbers of one life of a gate.

    Attributes:
        answered: by the name of the verb; "none" is a path or a method that no verb has.
        broken_answers: that had begun, and were broken off as something went wrong.
        stored_bytes: as they went to the daemon; ``sent_bytes``: of the answers that have records.
        expiries: when the first certificate of each file expires, in seconds since 1970.
        streams: answers under way that go on with what is appended later.
    """

    answered: dict[str, Answered] = field(default_factory=dict)
    broken_answers: int = 0
    stored_records: int = 0
    stored_bytes: int = 0
    sent_records: int = 0
    sent_bytes: int = 0
    expiries: dict[str, float] = field(default_factory=dict)
    streams: int = 0

    def count_stored(self, records: int, size: int) -> None:
        """Count what is on disk since a request."""
        self.stored_records += records
        self.stored_bytes += size

    def of_verb(self, name: str) -> Answered:
        """The answers of the verb of that name."""
        return self.answered.setdefault(name, Answered())
