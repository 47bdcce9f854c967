"""What relief has dropped from a sealed segment, as the section ``relieved`` of its index says it.

{"sha256": …, "bytes": …,            of the raw segment, and of the file, as they were sealed
 "dropped": [[first, last], …],      each run of dropped records
 "routes": […]}                      of the dropped records: [route, count, first, last, payload bytes]
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from wald.format.tables import RouteEntry


@dataclass(frozen=True, slots=True)
class Relieved:
    """
    Attributes:
        sha256: of the raw bytes as they were sealed; empty if not known.
        stored_bytes: the length of the file as it was sealed; 0 if not known.
        ranges: the dropped records as (first, last), in order, as long as possible.
        routes: what was dropped of each route: always the first batches that the segment held of it; less
            than that, if the index was made anew in between, from frames that do not show the routes.
    """

    sha256: bytes
    stored_bytes: int
    ranges: list[tuple[int, int]]
    routes: list[RouteEntry]

    @property
    def records(self) -> int:
        """How many records were dropped."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def names_all(self) -> bool:
        """Whether ``routes`` has all that was dropped: not if the index was made anew, also before another relief."""
        return sum(entry.count for entry in self.routes) == self.records

    @property
    def lasts(self) -> dict[str, int] | None:
        """The last sequence that was dropped of each route; None if ``routes`` has not all that was dropped."""
        return {entry.route: entry.last for entry in self.routes} if self.names_all else None

    def encoded(self) -> bytes:
        """The content of the section."""
        sealed = {"sha256": self.sha256.hex(), "bytes": self.stored_bytes}
        return json.dumps(sealed | {"dropped": self.ranges, "routes": self.routes}, separators=(",", ":")).encode()

    def dropped_between(self, first: int, following: int) -> bool:
        """Whether any record first ≤ s < following was dropped."""
        return any(begin < following and first <= last for begin, last in self.ranges)


def joined(routes: Iterable[RouteEntry], others: Iterable[RouteEntry]) -> list[RouteEntry]:
    """What is held of each route, where ``routes`` are a part of it and ``others`` the rest."""
    found = {entry.route: entry for entry in routes}
    for entry in others:
        old = found.get(entry.route)
        found[entry.route] = entry if old is None else old.plus(entry)
    return list(found.values())
