"""How fast a log grows, measured over its newest segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

_SECOND_NS = 1_000_000_000
RECENT_SEGMENTS = 16  # over which growth is measured, and over more where these are of a short time
LEAST_SECONDS = 600  # what has come in less says nothing of a day


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes a second, on disk.

    Attributes:
        routes: shares of it, by payload.
    """

    bytes_per_second: float
    routes: dict[str, float]

    def seconds_until(self, free: int) -> float | None:
        """Until ``free`` bytes are used up, if nothing is reclaimed; None if nothing grows."""
        return free / self.bytes_per_second if self.bytes_per_second > 0 else None


@dataclass(frozen=True, slots=True)
class _Recent:
    """A segment, or several; the bytes on disk of each route in it."""

    earliest_ns: int
    stored_bytes: int
    routes: dict[str, float]

    def with_next(self, following: _Recent) -> _Recent:
        routes = dict(self.routes)
        for route, stored_bytes in following.routes.items():
            routes[route] = routes.get(route, 0.0) + stored_bytes
        return _Recent(self.earliest_ns, self.stored_bytes + following.stored_bytes, routes)


class GrowthMeter:
    """Measures growth; its memory does not grow with the number of segments."""

    def __init__(self) -> None:
        self._recent: list[_Recent] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, earliest_ns: int, stored_bytes: int, payload_bytes: dict[str, int]) -> None:
        """Add a segment, newer than all before it; older ones that are not needed are left off.

        Args:
            earliest_ns: append time of its first record.
            payload_bytes: of each route.
        """
        total = sum(payload_bytes.values())
        shares = {route: stored_bytes * each / total for route, each in payload_bytes.items()} if total else {}
        newest = _Recent(earliest_ns, stored_bytes, shares)
        recent = self._recent
        recent.append(newest)
        while len(recent) > RECENT_SEGMENTS and recent[1].earliest_ns <= earliest_ns - LEAST_SECONDS * _SECOND_NS:
            del recent[0]
        if len(recent) > 2 * RECENT_SEGMENTS:  # all are needed, so two become one
            pairs = zip(recent[:-1:2], recent[1:-1:2], strict=True)
            self._recent = [*(one.with_next(other) for one, other in pairs), newest]

    def growth(self, *, now_ns: int) -> Growth | None:
        """None if too little is known, or the clock is wrong."""
        if not self._recent or now_ns < self._recent[0].earliest_ns + LEAST_SECONDS * _SECOND_NS:
            return None
        seconds = (now_ns - self._recent[0].earliest_ns) / _SECOND_NS
        total = reduce(_Recent.with_next, self._recent)
        return Growth(total.stored_bytes / seconds, {route: each / seconds for route, each in total.routes.items()})
