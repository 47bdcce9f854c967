"""Segments of a log and the groups that need them.

What the log holds, which groups need it, and how fast it grows: the facts behind ``wald explain`` and ``wald top``.

Every sealed segment's index is read, and nothing is decompressed but one whose index is damaged; raw ones are read to
their end. Memory does not grow with the number of segments: they come one by one, and what they add up to is kept per
group.

What keeps a segment, or that nothing does: under these conditions ``wald top`` and the metrics count segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from operator import add

from wald.errors import Damaged
from wald.files.disk import free_bytes
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, FrameTable, RouteEntry, RouteTable, SealedIndex, merge_routes
from wald.hints import hint_for
from wald.retention.blockers import (
    NO_PINS,
    Blockers,
    CursorSnapshot,
    Holders,
    holders_of,
    needs,
    read_claims,
    segment_index,
    with_lost,
)
from wald.retention.cursors import Cursor
from wald.retention.handovers import HandoverPin
from wald.retention.history import History
from wald.retention.progress import Lag, SealedLags, add_raw
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.view import SegmentGone, State, View, open_segment

_SECOND_NS = 1_000_000_000
RECENT_SEGMENTS = 16  # over which growth is measured, and over more where these are of a short time
LEAST_SECONDS = 600  # what has come in less says nothing of a day


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """One segment.

    Attributes:
        last_sequence: of the records in it; None if not known.
        stored_bytes: of its file.
        pins: the groups that hold it back; of a complete one, sealed or not.
        waived: the retired routes with records in it that a group has not read; nothing is held back for them.
        routes: what it holds of each; of a complete one, as far as it is known.
        newest: whether it is the newest of all; RECLAIM leaves it, because the next start goes on behind it.
        problem: what is wrong with it; "" if nothing is.
        readable: whether the routes of its records are known; its frames may give them if its index is damaged.
        hint: what can be done about one that is not.
    """

    segment: Segment
    state: State
    last_sequence: int | None
    stored_bytes: int
    pins: Blockers = NO_PINS
    waived: tuple[str, ...] = ()
    problem: str = ""
    readable: bool = True
    hint: str = ""
    newest: bool = False
    routes: Sequence[RouteEntry] = ()


@dataclass(slots=True)
class GroupBacklog:
    """One group of one route, and what it holds back.

    Attributes:
        pinned_segments, pinned_bytes: complete ones that it holds back, alone or with others.
        exclusive_bytes: of those, the ones that no other group holds back: freed when this cursor reaches the head.
        lag: what it has still to process.
    """

    cursor: Cursor
    retired: bool
    pinned_segments: int = 0
    pinned_bytes: int = 0
    exclusive_bytes: int = 0
    lag: Lag = field(init=False)

    def __post_init__(self) -> None:
        self.lag = Lag(self.cursor.effective)


@dataclass(slots=True)
class _Held:
    """Segments that the same groups hold back."""

    pins: Blockers
    segments: int = 0
    stored_bytes: int = 0


class Backlog:
    """What ``view`` shows; iterate over :meth:`segments` first, the rest is known afterwards.

    Args:
        after: the last record of an earlier backlog, to count what was received after it; None: nothing is counted.

    Attributes:
        groups: by (route, group).
        alone: the bytes that each route alone holds back: freed when all its groups reach the head.
        free_bytes: left on the file system.

    Raises:
        Damaged: the directory or the end of the log cannot be read.
    """

    def __init__(self, view: View, *, after: int | None = None) -> None:
        self._view = view
        self._after = after
        self._observers: dict[str, Lag] = {}
        self._of_route: dict[str, list[Lag]] = {}
        self._claims: CursorSnapshot = read_claims(view.root, log_id=view.log_id)
        self._history = History(view.root)
        self._gauge = GrowthMeter()
        self._sealed = SealedLags(self._counting)
        self._names: tuple[str, ...] = ()
        self._holders: Holders = NO_PINS.holders
        """Of segments with these routes."""
        self._held = _Held(NO_PINS)
        self.free_bytes = free_bytes(view.root.segments)
        self.alone: Counter[str] = Counter()
        self.groups = {
            (route, cursor.group): GroupBacklog(cursor, route in self._claims.retired)
            for route, cursors in self._claims.cursors.items()
            for cursor in cursors
        }
        for group in self.groups.values():
            group.lag.written_ns = view.written_ns

    def segments(self) -> Iterator[SegmentStatus]:
        """Every segment, oldest first, the released ones before all others."""
        listing = self._view.listing
        bases = {segment.base_sequence for segment in listing.segments}
        for segment in listing.released:
            with suppress(FileNotFoundError):  # its grace period has ended
                yield self._released(segment, counts=segment.base_sequence not in bases)
        successors = listing.successors()
        for segment in listing.segments:
            with suppress(SegmentGone):
                yield self._view.follow(segment, lambda found: self._status(found, successors.get(found.base_sequence)))
        self._sealed.settle()
        self._settle_held()

    def growth(self, *, now_ns: int) -> Growth | None:
        """How fast the log grows, over its newest segments; None if it is too young, or the clock is wrong."""
        return self._gauge.growth(now_ns=now_ns)

    @property
    def handovers(self) -> tuple[HandoverPin, ...]:
        """Pins of unfinished handovers."""
        return self._claims.handovers

    def received(self) -> dict[str, int]:
        """Records of each route above ``after``; a route that is not in it has received none."""
        return {route: lag.records for route, lag in self._observers.items()}

    def lost_routes(self) -> tuple[str, ...]:
        """The routes with records whose directories are gone, by name. Their cursors are lost with them."""
        unknown = self._of_route.keys() - self._claims.cursors.keys()
        return tuple(sorted(name for name in unknown if not self._view.root.has_route(name)))

    def _released(self, segment: Segment, *, counts: bool) -> SegmentStatus:
        """Only a cursor that was moved back needs it."""
        found = SegmentStatus(segment, State.RELEASED, None, _stored_bytes(segment))
        if counts:
            with suppress(Damaged, BadSealed):
                index = segment_index(segment, self._view.log_id)
                self._sealed.add(index)
                return replace(found, routes=index.routes)
        return found

    def _status(self, segment: Segment, end: int | None) -> SegmentStatus:
        """
        Args:
            end: the base of the segment behind it; None: it is the newest.
        """
        state = self._view.state(segment)
        found = SegmentStatus(segment, state, None, _stored_bytes(segment), newest=end is None)
        if state is not State.ACTIVE:
            return self._complete(found, end)
        try:
            return replace(found, last_sequence=self._raw(segment))
        except Damaged as error:
            return replace(found, problem=error.message, readable=False, hint=error.hint)

    def _complete(self, found: SegmentStatus, end: int | None) -> SegmentStatus:
        """One that RECLAIM judges, by what it judges by."""
        segment, damage = found.segment, list[Damaged]()
        try:
            index = segment_index(segment, self._view.log_id, on_damage=damage.append)
            self._add(index, found)
            if damage:
                index = with_lost(index, segment, end, self._history, damage[0])
            needed = RouteTable.from_entries(needs(index, end or index.next_sequence, self._history))
            pins, waived = self._pins(needed), self._claims.waived(needed)
        except Damaged as error:
            if found.state is State.CUT:  # only the sealer may judge it, and its records wait all the same
                with suppress(Damaged):
                    self._raw(segment)
            return replace(found, problem=error.message, readable=False, hint=error.hint)
        except BadSealed as error:
            problem = f"{segment.path}: its batches cannot be found: {error}"
            return replace(
                found,
                problem=problem,
                readable=False,
                hint=hint_for("lost-routes-unknown", root=segment.path.parents[1]),
            )
        self._hold(pins, found.stored_bytes)
        problem = damage[0].message if damage else ""
        last = index.next_sequence - 1
        return replace(found, last_sequence=last, pins=pins, waived=waived, problem=problem, routes=index.routes)

    def _pins(self, routes: RouteTable) -> Blockers:
        if routes.names is not self._names:
            self._names, self._holders = routes.names, holders_of(self._claims, routes.names)
        return self._holders.pins(routes)

    def _hold(self, pins: Blockers, stored_bytes: int) -> None:
        """Count a segment that is held back, together with those before it that the same groups hold back."""
        if not pins.of_same_groups(self._held.pins):
            self._settle_held()
            self._held = _Held(pins)
        self._held.segments += 1
        self._held.stored_bytes += stored_bytes

    def _settle_held(self) -> None:
        held, self._held = self._held, _Held(NO_PINS)
        exclusive_bytes = held.stored_bytes if len(held.pins) == 1 else 0
        if len(routes := {route for route, _ in held.pins.groups()}) == 1:
            self.alone[routes.pop()] += held.stored_bytes
        for each in held.pins.groups():
            group = self.groups.get(each)
            if group is not None:
                group.pinned_segments += held.segments
                group.pinned_bytes += held.stored_bytes
                group.exclusive_bytes += exclusive_bytes

    def _add(self, index: SealedIndex, found: SegmentStatus) -> None:
        """Add what a complete segment holds to the lags and the growth."""
        earliest_ns = min(FrameTable.from_frames(index.frames).earliest_ns, default=0)
        routes = RouteTable.from_entries(index.routes)
        grown = found.stored_bytes if found.state is State.SEALED else sum(routes.payload_bytes)
        if (relieved := index.shrunk) is not None:  # what came in is what counts
            routes = RouteTable.from_entries(merge_routes(index.routes, relieved.routes))
            grown = relieved.stored_bytes or grown
        self._gauge.add(earliest_ns, grown, routes.names, routes.payload_bytes)
        self._sealed.add(index)

    def _counting(self, route: str) -> list[Lag]:
        """The lag of every group of a route, and of an imaginary one that has processed everything up to ``after``."""
        found = self._of_route.get(route)
        if found is None:
            cursors = self._claims.cursors.get(route, ())
            found = self._of_route[route] = [self.groups[route, cursor.group].lag for cursor in cursors]
            if self._after is not None:
                self._observers[route] = Lag(self._after)
                found.append(self._observers[route])
        return found

    def _raw(self, segment: Segment) -> int:
        """Add what a raw segment holds; returns its last sequence."""
        last = segment.base_sequence - 1
        earliest_ns: int | None = None
        payload_bytes: dict[str, int] = {}
        opened = open_segment(segment, self._view.log_id)
        try:
            batches = opened.batches(FIRST_BATCH, self._view.limit(segment))
            for met in add_raw(batches, self._counting):
                header = met.header
                earliest_ns = header.append_time_ns if earliest_ns is None else earliest_ns
                last = max(last, header.end_sequence - 1)
                payload_bytes[met.route] = payload_bytes.get(met.route, 0) + header.payload_bytes
        finally:
            opened.close()
        if earliest_ns is not None:
            self._gauge.add(earliest_ns, sum(payload_bytes.values()), tuple(payload_bytes), [*payload_bytes.values()])
        return last


def _stored_bytes(segment: Segment) -> int:
    """On disk: a raw segment takes what is allocated for it."""
    status = segment.path.stat()
    return status.st_blocks * 512 if segment.kind.form is Kind.RAW else status.st_size


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
    """A segment, or several; the payload of each route in it."""

    earliest_ns: int
    stored_bytes: int
    names: tuple[str, ...]
    payload_bytes: Sequence[int]

    def with_next(self, following: _Recent) -> _Recent:
        stored_bytes = self.stored_bytes + following.stored_bytes
        if self.names is following.names:
            payload_bytes = list(map(add, self.payload_bytes, following.payload_bytes))
            return _Recent(self.earliest_ns, stored_bytes, self.names, payload_bytes)
        sums = Counter(dict(zip(self.names, self.payload_bytes, strict=True)))
        sums.update(dict(zip(following.names, following.payload_bytes, strict=True)))
        return _Recent(self.earliest_ns, stored_bytes, tuple(sums), list(sums.values()))

    def shares(self) -> Iterator[tuple[str, float]]:
        """The bytes on disk of each route."""
        total = sum(self.payload_bytes) or 1
        for name, each in zip(self.names, self.payload_bytes, strict=True):
            yield name, self.stored_bytes * each / total


class GrowthMeter:
    """Measures growth; its memory does not grow with the number of segments."""

    def __init__(self) -> None:
        self._recent: list[_Recent] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, earliest_ns: int, stored_bytes: int, names: tuple[str, ...], payload_bytes: Sequence[int]) -> None:
        """Add a segment, newer than all before it; older ones that are not needed are left off.

        Args:
            earliest_ns: append time of its first record.
            names, payload_bytes: of each route.
        """
        newest = _Recent(earliest_ns, stored_bytes, names, payload_bytes)
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
        routes: dict[str, float] = {}
        for name, stored_bytes in chain.from_iterable(recent.shares() for recent in self._recent):
            routes[name] = routes.get(name, 0.0) + stored_bytes / seconds
        return Growth(sum(recent.stored_bytes for recent in self._recent) / seconds, routes)


class Condition(Enum):
    """Conditions of segments, from those of the oldest to that of the newest."""

    RELEASED = "released"
    FREE = "free"
    HELD_BACK = "held back"
    UNREADABLE = "unreadable"
    WAITING = "not sealed yet"
    """Cut, and no cursor holds it back."""
    ACTIVE = "active"


def condition_of(status: SegmentStatus) -> Condition:
    """The condition under which a segment is counted."""
    if not status.readable:
        return Condition.UNREADABLE
    if status.pins:
        return Condition.HELD_BACK
    match status.state:
        case State.ACTIVE:
            return Condition.ACTIVE
        case State.CUT:
            return Condition.WAITING
        case State.RELEASED:
            return Condition.RELEASED
    return Condition.FREE
