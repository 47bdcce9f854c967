"""Requested records that were reclaimed or lost: their number, and the error or callback.

A reclaimed segment whose times or routes are unknown may have had any requested records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from wald.errors import InvalidInput, NotFound
from wald.format.sealed_index import RouteEntry

_MIN_NS, _MAX_NS = -(1 << 63), (1 << 63) - 1


def span_text(first: int, last: int) -> str:
    return f"record {first}" if first == last else f"records {first} to {last}"


class ReclaimedSegment(NamedTuple):
    """Reclaimed segment. A fact that no ledger has is None."""

    first: int
    last: int
    routes: tuple[RouteEntry, ...] | None = None
    earliest_ns: int | None = None
    latest_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Requested records that no longer exist.

    Attributes:
        root: root directory of the log.
        first, last: range of their sequences.
        records: an upper limit unless ``exact``.
        route: the route that was read; None for all.
        routes: known routes of the records.
        last_of_route: upper limit of each route's last sequence.
        asked: True if these were requested by a sequence, a time, or a cursor before them.
        group: the group of that cursor; None without a cursor.
        archive: location of bundles with the records, if known.
        lost: why the records were given up, and where their bytes are; "" if reclaimed.
    """

    root: Path
    first: int
    last: int
    records: int
    exact: bool
    route: str | None
    routes: frozenset[str]
    asked: bool = False
    group: str | None = None
    archive: str | None = None
    last_of_route: dict[str, int] = field(default_factory=dict)
    lost: str = ""

    def message(self) -> str:
        """Return a sentence about the missing records."""
        span = span_text(self.first, self.last)
        count = f"{'' if self.exact else 'up to '}{self.records} {'record' if self.records == 1 else 'records'}"
        of = "" if self.route is None else f" of route {self.route}"
        are = "is" if self.records == 1 else "are"
        if self.lost:
            lost, were = ("is lost", "it was") if self.first == self.last else ("are lost", "they were")
            return f"{self.root / 'segments'}: {span} {lost}: {count}{of} {are} missing; {were} {self.lost}"
        return f"{self.root / 'segments'}: RECLAIM has removed {span}: {count}{of} {are} missing"

    def error(self, *, stop: str | None = None, form: str = "", command: tuple[str, str] | None = None) -> NotFound:
        """Return the error, with hints to archives and later records. ``command`` omits ``wald`` and the root."""
        route = self.route or next(iter(sorted(self.routes)), "ROUTE")
        return NotFound(
            self.message(),
            case="records-missing",
            root=self.root,
            first=self.first,
            last=self.last,
            route=route,
            group=self.group,
            archive=self.archive,
            archived=self.last_of_route.get(route, self.last),
            stop=stop,
            form=form,
            command=command or (f"read {self.route or ''}".rstrip(), ""),
        )


OnMissing = Literal["error", "skip"] | Callable[[Missing], None] | None


def missing_handler(on_missing: OnMissing) -> Callable[[Missing], None]:
    """Return a callback for missing records. With None, it raises only if they were requested."""
    if callable(on_missing):
        return on_missing
    if on_missing not in ("error", "skip", None):
        raise InvalidInput(f"invalid on_missing: {on_missing!r}", case="on-missing-unknown")

    def handle(missing: Missing) -> None:
        if on_missing == "error" or (on_missing is None and missing.asked):
            raise missing.error()

    return handle


def count_missing(
    root: Path,
    segments: Iterable[ReclaimedSegment],
    routes: frozenset[str] | None,
    first: int,
    last: int,
    *,
    floor: Callable[[str], int] | None = None,
    from_ns: int = _MIN_NS,
    until_ns: int = _MAX_NS,
) -> Missing | None:
    """Return the requested records that were reclaimed, or None. ``floor`` replaces ``first`` by route."""
    lowest, highest, records, is_exact = last, 0, 0, True
    last_of_route: dict[str, int] = {}
    all_times = from_ns == _MIN_NS and until_ns == _MAX_NS
    for segment in segments:
        earliest_ns, latest_ns = segment.earliest_ns, segment.latest_ns
        if latest_ns is not None and latest_ns < from_ns:
            continue
        if earliest_ns is not None and earliest_ns >= until_ns:
            continue
        is_inside = all_times or (
            earliest_ns is not None and latest_ns is not None and from_ns <= earliest_ns and latest_ns < until_ns
        )
        for entry in _requested_routes(segment, routes, first):
            low, high = max(entry.first, floor(entry.route) if floor else first), min(entry.last, last)
            if low > high:
                continue
            # ``low`` is before the segment if it had only later pieces of the record
            lowest = min(lowest, max(segment.first, first), low)
            highest = max(highest, min(segment.last, last))
            records += min(entry.count or high - low + 1, high - low + 1)
            is_exact = is_exact and is_inside and entry.count > 0 and (low, high) == (entry.first, entry.last)
            last_of_route[entry.route] = max(high, last_of_route.get(entry.route, 0))
    if not records:
        return None
    route = next(iter(routes)) if routes and len(routes) == 1 else None
    known_routes = frozenset(filter(None, last_of_route))
    return Missing(root, lowest, highest, records, is_exact, route, known_routes, last_of_route=last_of_route)


def _requested_routes(segment: ReclaimedSegment, routes: frozenset[str] | None, first: int) -> Iterable[RouteEntry]:
    """Return the requested routes of a segment, or one entry for all its records if unknown."""
    if segment.routes is not None:
        return [entry for entry in segment.routes if routes is None or entry.route in routes]
    if routes is None:
        return [RouteEntry("", 0, max(segment.first, first), segment.last)]
    return [RouteEntry(route, 0, segment.first, segment.last) for route in sorted(routes)[:1]]
