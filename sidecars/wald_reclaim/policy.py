"""Rules of deletion and shrinking: facts in, verdicts out. Nothing here reads the disk or a clock.

A segment that every group has read may be deleted. Three limits keep it longer, others override them:

    min_age            keep younger segments
    keep_bytes         keep the newest segments, at least this many bytes
    require_archived   keep records that are not in a bundle yet

    max_age, max_bytes, max_records    delete what exceeds one of these, regardless of min_age and keep_bytes;
                                       unarchived records stay if require_archived is set, and unread records stay
                                       unless ``expire`` is set, which counts them as lost

Limits of the log count files. Limits of a route count its records and payload bytes. A segment is deleted when every
route in it agrees: its records there are read, or exceed a limit and may expire. Unless all of them exceed a limit,
min_age and keep_bytes apply. A route may also have a quota of unread bytes, beyond which records expire.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import NamedTuple

from wald.files.uptime import Moment
from wald.format.batch import BatchHeader
from wald.format.sealed_index import RouteEntry, RouteTable, SealedIndex
from wald.retention.blockers import CursorSnapshot

SHRINK_LEAST_SHARE = 0.5  # of the file that a shrink must free, …
SHRINK_LEAST_BYTES = 16 << 10  # … which must also exceed the ledger's line and the blocks of the file system


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Upper limits of one route; None means unlimited. Bytes are payload bytes."""

    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    expire: bool = False  # delete even unread records beyond a limit of the route or of the log
    pinned_max_bytes: int | None = None  # quota of unread bytes; the oldest beyond it expire

    @property
    def has_amounts(self) -> bool:
        """True if a limit depends on how much of the route is newer."""
        return any(limit is not None for limit in (self.max_bytes, self.max_records, self.pinned_max_bytes))

    def exceeded_by(self, held_bytes: int, held_records: int) -> tuple[bool, bool, bool]:
        """Return True for max_bytes, max_records and (if all is unread) pinned_max_bytes where they are exceeded."""
        return (
            self.max_bytes is not None and held_bytes > self.max_bytes,
            self.max_records is not None and held_records > self.max_records,
            self.pinned_max_bytes is not None and held_bytes > self.pinned_max_bytes,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits set by the operator; None means unset. Bytes are file sizes, sealed or raw."""

    min_age_ns: int | None = None
    keep_bytes: int | None = None
    require_archived: bool = False
    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    of_routes: Mapping[str, RouteLimits] = field(default_factory=dict)
    others: RouteLimits = RouteLimits()

    @property
    def by_age(self) -> bool:
        ages = (self.min_age_ns, self.max_age_ns, *(each.max_age_ns for each in self.every_route()))
        return any(age is not None for age in ages)

    @property
    def by_route(self) -> bool:
        return bool(self.of_routes) or self.others != RouteLimits(expire=self.others.expire)

    def every_route(self) -> tuple[RouteLimits, ...]:
        return (self.others, *self.of_routes.values())

    def of(self, route: str) -> RouteLimits:
        return self.of_routes.get(route, self.others)

    def may_lose(self, route: str) -> bool:
        """Return True if a limit may delete unread records of a route."""
        limits = self.of(route)
        return limits.expire or limits.pinned_max_bytes is not None


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """Records of one route in one complete segment, and in the newer complete segments."""

    age_ns: int
    payload_bytes: int
    records: int
    newer_bytes: int
    newer_records: int
    is_read: bool
    unread_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """One complete segment, and the newer complete ones."""

    age_ns: int  # least time since it was complete
    stored_bytes: int
    records: int
    newer_bytes: int
    newer_records: int
    is_archived: bool  # every record of a route that is not retired is in a bundle
    is_newest: bool  # the newest segment of the log, where the next start of the daemon continues
    is_being_sealed: bool  # the sealer has not finished
    is_readable: bool  # its index or its frames show which routes have records in it


class Verdict(Enum):
    """Rule that deletes a segment, as written to the ledger, or reason to keep it."""

    READ = "read"
    MAX_AGE = "max_age"
    MAX_BYTES = "max_bytes"
    MAX_RECORDS = "max_records"
    PINNED_MAX_BYTES = "pinned_max_bytes"
    EACH_ROUTE = "each_route"  # routes have different rules

    NEWEST = "it is the newest segment"
    SEALING = "it is not sealed yet"
    UNREADABLE = "it cannot be read, so it is not known which groups need it"
    UNREAD = "a group has not read it"
    NOT_ARCHIVED = "it is not archived yet"
    YOUNG = "it may be younger than --min-age"
    KEPT_BYTES = "it is among the newest --keep-bytes"

    @property
    def is_deletion(self) -> bool:
        return self in _DELETIONS


_DELETIONS = tuple(Verdict)[:6]  # the others are reasons to keep a segment


def exceeded_limit(facts: Facts, limits: Limits) -> Verdict | None:
    return _exceeded(limits, facts.age_ns, facts.newer_bytes + facts.stored_bytes, facts.newer_records + facts.records)


def _exceeded(limits: Limits | RouteLimits, age_ns: int, held_bytes: int, held_records: int) -> Verdict | None:
    if limits.max_age_ns is not None and age_ns > limits.max_age_ns:
        return Verdict.MAX_AGE
    if limits.max_bytes is not None and held_bytes > limits.max_bytes:
        return Verdict.MAX_BYTES
    return Verdict.MAX_RECORDS if limits.max_records is not None and held_records > limits.max_records else None


def judge_route(facts: RouteFacts, limits: RouteLimits, log_limit: Verdict | None) -> Verdict:
    """Return UNREAD, READ, or the limit of the log or of the route that the route's records exceed."""
    held_bytes, held_records = facts.newer_bytes + facts.payload_bytes, facts.newer_records + facts.records
    exceeded = log_limit or _exceeded(limits, facts.age_ns, held_bytes, held_records)
    if exceeded is not None and (facts.is_read or limits.expire):
        return exceeded
    if facts.is_read:
        return Verdict.READ
    _, _, is_over_quota = limits.exceeded_by(facts.newer_bytes + facts.unread_bytes, 0)
    return Verdict.PINNED_MAX_BYTES if is_over_quota else Verdict.UNREAD


def judge(facts: Facts, limits: Limits, routes: Collection[Verdict]) -> Verdict:
    if facts.is_newest:
        return Verdict.NEWEST
    if facts.is_being_sealed:
        return Verdict.SEALING
    if not facts.is_readable:
        return Verdict.UNREADABLE
    rules = set(routes) or {exceeded_limit(facts, limits) or Verdict.READ}
    if Verdict.UNREAD in rules:
        return Verdict.UNREAD
    if limits.require_archived and not facts.is_archived:
        return Verdict.NOT_ARCHIVED
    if Verdict.READ in rules:
        if limits.min_age_ns is not None and facts.age_ns < limits.min_age_ns:
            return Verdict.YOUNG
        if limits.keep_bytes is not None and facts.newer_bytes < limits.keep_bytes:
            return Verdict.KEPT_BYTES
    return rules.pop() if len(rules) == 1 else Verdict.EACH_ROUTE


def is_grace_over(since: Moment | None, now: Moment, grace_ns: int) -> bool:
    """Return True if the grace period after a deletion's line is over. A reboot ends it, because no reader survives."""
    if grace_ns == 0:
        return True
    return since is not None and (now.boot != since.boot or now.boottime_ns - since.boottime_ns >= grace_ns)


def unread_records(index: SealedIndex, cursors: CursorSnapshot) -> dict[str, int]:
    """Return, by route, how many records of a segment its slowest group has not read."""
    slowest: dict[int, int] = {}
    numbers = {route: number for number, route in enumerate(index.routes.names)}
    for pin in cursors.pins(index.routes):
        number = numbers[pin.route]
        slowest[number] = min(pin.at, slowest.get(number, pin.at))
    if not slowest:
        return {}
    read = dict.fromkeys(slowest, 0)
    table = index.batch_table()
    for route, base, count in zip(table.routes, table.bases, table.counts, strict=True):
        if route in slowest:
            read[route] += max(0, min(count, slowest[route] + 1 - base))
    # A damaged segment has fewer batches than records. A record that cannot be found counts as unread.
    held = {number: index.routes[number] for number in slowest}
    return {entry.route: min(entry.count - read[n], entry.last - slowest[n]) for n, entry in held.items()}


def share_of_bytes(entry: RouteEntry, records: int) -> int:
    """Return the payload bytes of ``count`` records of an entry, by their average size."""
    return entry.payload_bytes * records // entry.count if entry.count else 0


class _Amount(NamedTuple):
    payload_bytes: int = 0
    records: int = 0


class _Mark(NamedTuple):
    """Segment at which a route exceeds a limit, with the amounts after it and including it."""

    base: int
    after: _Amount
    held: _Amount


class RouteAmounts:
    """Amounts of each limited route in the complete segments, counted from the newest.

    Only the amounts at which a route exceeds a limit are kept, because all older records exceed that limit too. So
    memory does not grow with the number of segments.
    """

    def __init__(self, limits: Limits, *, remembered_max: int = 1 << 19) -> None:
        self._limits = limits
        self._remembered_max = remembered_max
        ages = (each.max_age_ns for each in limits.every_route() if each.max_age_ns is not None)
        self._least_age_ns = min(ages, default=math.inf)
        limited = frozenset(name for name, each in limits.of_routes.items() if each.has_amounts)
        self._is_counted = None if limits.others.has_amounts else limited.__contains__  # None: every route is
        self._counts_any = limits.others.has_amounts or bool(limited)
        self._counted: list[tuple[int, int]] = []
        self._marks: dict[str, list[_Mark]] = {}
        self._newest_mark = 0
        self._numbers: dict[str, int] = {}
        self._remembered: dict[tuple[int, int], array[int]] = {}
        self._remembered_values = 0

    def count(self, sizes: Mapping[int, int], routes_of: Callable[[int], RouteTable]) -> None:
        """Count the contents of the complete segments, newest first, if the ``sizes`` of their files changed."""
        counted = list(sizes.items())
        if not self._counts_any or counted == self._counted:
            return
        self._remembered = {key: self._remembered[key] for key in counted if key in self._remembered}
        self._remembered_values = sum(map(len, self._remembered.values()))
        self._marks, self._newest_mark, self._counted = {}, 0, counted
        totals: dict[int, _Amount] = {}
        for key in counted:
            values = self._remembered.get(key)
            if values is None:
                values = self._remember(key, routes_of(key[0]))
            names = list(self._numbers)
            for number, payload_bytes, records in zip(values[::3], values[1::3], values[2::3], strict=True):
                after = totals.get(number, _Amount())
                held = totals[number] = _Amount(after.payload_bytes + payload_bytes, after.records + records)
                limits = self._limits.of(names[number])
                if limits.exceeded_by(*after) != limits.exceeded_by(*held):
                    self._marks.setdefault(names[number], []).append(_Mark(key[0], after, held))
                    self._newest_mark = max(self._newest_mark, key[0])

    def _remember(self, key: tuple[int, int], table: RouteTable) -> array[int]:
        values = array("Q")
        is_wanted = map(self._is_counted, table.names) if self._is_counted is not None else [True] * len(table)
        rows = zip(table.names, table.payload_bytes, table.counts, strict=True)
        for name, payload_bytes, count in compress(rows, is_wanted):
            values.extend((self._numbers.setdefault(name, len(self._numbers)), payload_bytes, count))
        if self._remembered_values + len(values) <= self._remembered_max:
            self._remembered[key] = values
            self._remembered_values += len(values)
        return values

    def may_exceed(self, base: int, age_ns: int, log_limit: Verdict | None) -> bool:
        """Return True if a route may exceed a limit in the segment, so that each route must be judged."""
        is_past = log_limit is not None or base <= self._newest_mark or age_ns > self._least_age_ns
        return is_past and self._limits.by_route

    def may_lose(self, route: str, base: int, age_ns: int, log_limit: Verdict | None) -> bool:
        """Return False if no limit can delete unread records of the route in the segment."""
        limits = self._limits.of(route)
        is_old = limits.max_age_ns is not None and age_ns > limits.max_age_ns
        return self._mark_of(route, base) is not None or (limits.expire and (log_limit is not None or is_old))

    def verdicts(
        self, base: int, age_ns: int, log_limit: Verdict | None, held: Iterable[RouteEntry], unread: Mapping[str, int]
    ) -> dict[str, Verdict]:
        """Return the verdict of each route in a segment; ``unread`` counts records that some group has not read."""
        verdicts = {}
        for entry in held:
            mark = self._mark_of(entry.route, base)
            newer = _Amount() if mark is None else mark.after if mark.base == base else mark.held
            facts = RouteFacts(
                age_ns=age_ns,
                payload_bytes=entry.payload_bytes,
                records=entry.count,
                newer_bytes=newer.payload_bytes,
                newer_records=newer.records,
                is_read=entry.route not in unread,
                unread_bytes=share_of_bytes(entry, unread.get(entry.route, 0)),
            )
            verdicts[entry.route] = judge_route(facts, self._limits.of(entry.route), log_limit)
        return verdicts

    def _mark_of(self, route: str, base: int) -> _Mark | None:
        """Return the route's oldest mark that is not older than the segment; it exceeds all limits of newer marks."""
        return next((mark for mark in reversed(self._marks.get(route, ())) if mark.base >= base), None)


@dataclass(frozen=True, slots=True)
class Floors:
    """Last unneeded record of each route in a segment; if a route has none, all of its records are needed."""

    of_routes: Mapping[str, int]

    @classmethod
    def of(
        cls, index: SealedIndex, cursors: CursorSnapshot, all_archived: Callable[[str, int, int], bool] | None
    ) -> Floors:
        """Return the floors under these cursors; with ``all_archived`` None, unarchived records may be dropped, too."""
        floors = {}
        for entry in index.routes:
            floor = cursors.floor(entry.route)
            unneeded = min(floor, entry.last)
            if all_archived is not None and entry.route not in cursors.retired and unneeded >= entry.first:
                floor = floor if all_archived(entry.route, entry.first, unneeded) else 0
            floors[entry.route] = floor
        return cls(floors)

    def keeps(self, header: BatchHeader, route: str) -> bool:
        return header.last_sequence > self.of_routes.get(route, 0)

    def freed_bytes(self, index: SealedIndex, stored_bytes: int) -> int:
        """Estimate the file bytes that a shrink frees; 0 if that is too little."""
        floors = [self.of_routes.get(entry.route, 0) for entry in index.routes]
        payload_bytes = sum(index.routes.payload_bytes)
        ends = zip(index.routes, floors, strict=True)
        at_most = sum(entry.payload_bytes for entry, floor in ends if floor >= entry.first)
        if not _is_worthwhile(at_most, payload_bytes, stored_bytes):  # without reading the many batches
            return 0
        kept = [0] * len(floors)
        table = index.batch_table()
        for route, base, count in zip(table.routes, table.bases, table.counts, strict=True):
            if base + count - 1 > floors[route]:
                kept[route] += count
        freed = payload_bytes - sum(map(share_of_bytes, index.routes, kept))
        return stored_bytes * freed // payload_bytes if _is_worthwhile(freed, payload_bytes, stored_bytes) else 0


def _is_worthwhile(freed_bytes: int, payload_bytes: int, stored_bytes: int) -> bool:
    share = freed_bytes / payload_bytes if payload_bytes else 0.0
    return share >= SHRINK_LEAST_SHARE and share * stored_bytes >= SHRINK_LEAST_BYTES
