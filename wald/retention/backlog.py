"""Segments of a log, the groups that need them, and the growth of the log.

All sealed indexes and all raw segments are read, in memory that does not grow with their number.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum
from operator import add
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.disk import free_bytes
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, RouteEntry, RouteTable, SealedIndex, merge_routes
from wald.hints import hint_for
from wald.retention.blockers import (
    NO_BLOCKERS,
    Blockers,
    read_cursor_snapshot,
    required_positions,
    segment_index,
    with_lost_routes,
)
from wald.retention.cursors import Cursor
from wald.retention.history import History
from wald.retention.progress import Lag, LagCounter
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.view import SegmentGone, State, View, open_segment

_SECOND_NS = 1_000_000_000
RECENT_SEGMENTS = 16  # for growth; more if they cover less than MIN_SECONDS
MIN_SECONDS = 600  # a shorter time does not predict a day


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """Status of one segment."""

    segment: Segment
    state: State
    last_sequence: int | None
    stored_bytes: int
    pins: Blockers = NO_BLOCKERS
    waived_routes: tuple[str, ...] = ()  # retired, with unread records; they pin nothing
    problem: str = ""
    readable: bool = True  # its routes are known, perhaps only from its frames
    hint: str = ""
    is_newest: bool = False  # RECLAIM keeps the newest segment: the next start continues after it
    routes: Sequence[RouteEntry] = ()  # of a complete segment, as far as known


class Condition(Enum):
    """Condition of a segment, from old to new."""

    RELEASED = "released"
    FREE = "free"
    PINNED = "pinned"
    UNREADABLE = "unreadable"
    WAITING = "not sealed yet"  # cut, but not pinned
    ACTIVE = "active"


_CONDITIONS = {State.ACTIVE: Condition.ACTIVE, State.CUT: Condition.WAITING, State.RELEASED: Condition.RELEASED}


def condition_of(status: SegmentStatus) -> Condition:
    if not status.readable:
        return Condition.UNREADABLE
    return Condition.PINNED if status.pins else _CONDITIONS.get(status.state, Condition.FREE)


@dataclass(slots=True)
class GroupBacklog:
    """Lag and pins of one group."""

    cursor: Cursor
    lag: Lag
    retired: bool
    pinned_segments: int = 0
    pinned_bytes: int = 0
    exclusive_bytes: int = 0  # pinned by this group alone


class Backlog:
    """Segments of a view, and the groups that pin them.

    Exhaust :meth:`segments` first. Records after ``after``, the last record of an earlier backlog, count as received.
    """

    def __init__(self, view: View, *, after: int | None = None) -> None:
        self._view = view
        self._after = after
        self._received: dict[str, Lag] = {}
        self._lags: dict[str, list[Lag]] = {}
        self._cursors = read_cursor_snapshot(view.root, log_id=view.log_id)
        self._history = History(view.root)
        self.growth_meter = GrowthMeter()
        self._counter = LagCounter(self._lags_of)
        self._latest_blockers = NO_BLOCKERS  # shared by the latest segments
        self._latest_segments = self._latest_bytes = 0
        self.free_bytes = free_bytes(view.root.segments)
        self.exclusive_bytes: Counter[str] = Counter()  # by route: bytes that no other route pins
        self.groups = {
            (route, cursor.group): GroupBacklog(
                cursor, Lag(cursor.effective, written_ns=view.written_ns), route in self._cursors.retired
            )
            for route, cursors in self._cursors.cursors.items()
            for cursor in cursors
        }
        self.handovers = self._cursors.handovers

    def segments(self) -> Iterator[SegmentStatus]:
        """Yield the status of each released segment, then of the others, oldest first."""
        listing = self._view.listing
        bases = {segment.base_sequence for segment in listing.segments}
        for segment in listing.released:
            with suppress(FileNotFoundError):  # deleted at this moment
                status = SegmentStatus(segment, State.RELEASED, None, _stored_bytes(segment))
                if segment.base_sequence not in bases:
                    with suppress(Damaged, BadSealed):
                        index, _ = segment_index(segment, self._view.log_id)
                        self._counter.add(index)
                        status = replace(status, routes=index.routes)
                yield status
        successors = listing.successors()
        for segment in listing.segments:
            with suppress(SegmentGone):
                yield self._view.follow(segment, lambda now: self._status(now, successors.get(now.base_sequence)))
        self._counter.settle()
        self._settle_pins()

    def received(self) -> dict[str, int]:
        return {route: lag.records for route, lag in self._received.items()}

    def lost_routes(self) -> tuple[str, ...]:
        """Return the routes that have records, but no directory and so no cursors."""
        without_cursors = self._lags.keys() - self._cursors.cursors.keys()
        return tuple(sorted(name for name in without_cursors if not self._view.root.has_route(name)))

    def _status(self, segment: Segment, next_base: int | None) -> SegmentStatus:
        """Return a segment's status by the rules of RECLAIM."""
        state = self._view.state(segment)
        status = SegmentStatus(segment, state, None, _stored_bytes(segment), is_newest=next_base is None)
        try:
            if state is State.ACTIVE:
                return replace(status, last_sequence=self._add_raw(segment))
            index, damage = segment_index(segment, self._view.log_id)
            self._add_complete(index, status)
            if damage is not None:
                index = with_lost_routes(index, segment, next_base, self._history, damage)
            required = required_positions(index, next_base or index.next_sequence, self._history)
        except Damaged as error:
            if state is State.CUT:  # the sealer decides about it, but its records count
                with suppress(Damaged):
                    self._add_raw(segment)
            return replace(status, problem=error.message, readable=False, hint=error.hint)
        except BadSealed as error:
            problem = f"{segment.path}: its batches cannot be found: {error}"
            root = segment.path.parents[1]
            return replace(status, problem=problem, readable=False, hint=hint_for("lost-routes-unknown", root=root))
        pins = self._cursors.blockers(required)
        if not pins.has_same_groups(self._latest_blockers):
            self._settle_pins()
            self._latest_blockers = pins
        self._latest_segments += 1
        self._latest_bytes += status.stored_bytes
        return replace(
            status,
            last_sequence=index.next_sequence - 1,
            pins=pins,
            waived_routes=self._cursors.waived_routes(required),
            problem=damage.message if damage is not None else "",
            routes=index.routes,
        )

    def _settle_pins(self) -> None:
        """Add the latest segments to the groups that pin them."""
        groups = list(self._latest_blockers.groups())
        if len(routes := {route for route, _ in groups}) == 1:
            self.exclusive_bytes[routes.pop()] += self._latest_bytes
        for each in groups:
            group = self.groups.get(each)
            if group is not None:
                group.pinned_segments += self._latest_segments
                group.pinned_bytes += self._latest_bytes
                group.exclusive_bytes += self._latest_bytes if len(groups) == 1 else 0
        self._latest_blockers, self._latest_segments, self._latest_bytes = NO_BLOCKERS, 0, 0

    def _add_complete(self, index: SealedIndex, status: SegmentStatus) -> None:
        earliest_ns = min(index.frames.earliest_ns, default=0)
        routes = index.routes
        growth_bytes = status.stored_bytes if status.state is State.SEALED else sum(routes.payload_bytes)
        if (dropped := index.shrunk) is not None:  # dropped records were received, too
            routes = RouteTable.from_entries(merge_routes(index.routes, dropped.routes))
            growth_bytes = dropped.stored_bytes or growth_bytes
        self.growth_meter.add(earliest_ns, growth_bytes, routes.names, routes.payload_bytes)
        self._counter.add(index)

    def _add_raw(self, segment: Segment) -> int:
        """Count a raw segment's records; return the last one."""
        last = segment.base_sequence - 1
        earliest_ns: int | None = None
        payload_bytes: Counter[str] = Counter()
        with closing(open_segment(segment, self._view.log_id)) as reader:
            for batch in self._counter.add_raw(reader.batches(FIRST_BATCH, self._view.limit(segment))):
                header = batch.header
                earliest_ns = header.append_time_ns if earliest_ns is None else earliest_ns
                last = max(last, header.end_sequence - 1)
                payload_bytes[batch.route] += header.payload_bytes
        if earliest_ns is not None:
            self.growth_meter.add(earliest_ns, payload_bytes.total(), tuple(payload_bytes), [*payload_bytes.values()])
        return last

    def _lags_of(self, route: str) -> list[Lag]:
        """Return the lags of a route's groups. An imaginary group at ``after`` counts the received records."""
        lags = self._lags.get(route)
        if lags is None:
            cursors = self._cursors.cursors.get(route, ())
            lags = self._lags[route] = [self.groups[route, cursor.group].lag for cursor in cursors]
            if self._after is not None:
                self._received[route] = Lag(self._after)
                lags.append(self._received[route])
        return lags


def _stored_bytes(segment: Segment) -> int:
    status = segment.path.stat()
    # a raw file is preallocated beyond its data
    return status.st_blocks * 512 if segment.kind.form is Kind.RAW else status.st_size


@dataclass(frozen=True, slots=True)
class Growth:
    """Gross growth in bytes on disk per second, divided among routes by payload."""

    bytes_per_second: float
    routes: dict[str, float]

    def seconds_until_full(self, free_bytes: int) -> float | None:
        return free_bytes / self.bytes_per_second if self.bytes_per_second > 0 else None


class _SegmentRun(NamedTuple):
    """One or more consecutive segments."""

    earliest_ns: int
    stored_bytes: int
    names: tuple[str, ...]
    payload_bytes: Sequence[int]

    def with_next(self, following: _SegmentRun) -> _SegmentRun:
        stored_bytes = self.stored_bytes + following.stored_bytes
        if self.names is following.names:
            payload_bytes = list(map(add, self.payload_bytes, following.payload_bytes))
            return _SegmentRun(self.earliest_ns, stored_bytes, self.names, payload_bytes)
        sums = Counter(dict(zip(self.names, self.payload_bytes, strict=True)))
        sums.update(dict(zip(following.names, following.payload_bytes, strict=True)))
        return _SegmentRun(self.earliest_ns, stored_bytes, tuple(sums), list(sums.values()))


class GrowthMeter:
    """Meter of growth over the newest segments, in bounded memory."""

    def __init__(self) -> None:
        self._recent: list[_SegmentRun] = []

    def add(self, earliest_ns: int, stored_bytes: int, names: tuple[str, ...], payload_bytes: Sequence[int]) -> None:
        newest = _SegmentRun(earliest_ns, stored_bytes, names, payload_bytes)
        recent = self._recent
        recent.append(newest)
        while len(recent) > RECENT_SEGMENTS and recent[1].earliest_ns <= earliest_ns - MIN_SECONDS * _SECOND_NS:
            del recent[0]
        if len(recent) > 2 * RECENT_SEGMENTS:  # all are needed, so merge neighbours
            pairs = zip(recent[:-1:2], recent[1:-1:2], strict=True)
            self._recent = [*(older.with_next(newer) for older, newer in pairs), newest]

    def growth(self, *, now_ns: int) -> Growth | None:
        """Return the growth, or None if the segments cover too little time or the clock is wrong."""
        if not self._recent or now_ns < self._recent[0].earliest_ns + MIN_SECONDS * _SECOND_NS:
            return None
        seconds = (now_ns - self._recent[0].earliest_ns) / _SECOND_NS
        routes: dict[str, float] = defaultdict(float)
        for _, stored_bytes, names, payload_bytes in self._recent:
            total = seconds * (sum(payload_bytes) or 1)
            for name, each in zip(names, payload_bytes, strict=True):
                routes[name] += stored_bytes * each / total
        return Growth(sum(recent.stored_bytes for recent in self._recent) / seconds, routes)
