"""Quotas of unread bytes per route.

How many payload bytes of a route a group has not read: what the segments held at the start, and what came since.

The bytes are kept in stretches of records, of which there are few. A stretch that is read in part counts by the share
of its records. What is read of the active segment, of which there is no index yet, is kept too: a cursor may be moved
back to it.

Which routes are over their quota: nothing more is taken of them before a group has read on.

Each turn adds what it has written to the routes that have a quota; the others cost nothing. Where that is more than
``pinned_max_bytes``, a look at the cursors of the route takes off what every group has read. Looks are made in the
loop, at most for 2 ms each. What segments held at the start is read from their indexes, in a thread, and until that is
done nothing is taken of routes that have a quota.

A cursor that is moved back, and a new group, need what does not count any more. So the cursors of the routes with a
quota are looked at some times a second while the daemon has work, and such a route is counted again, in the thread; it
goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import Damaged, NotFound
from wald.files.layout import Root
from wald.files.listing import Segment, list_segments
from wald.format.sealed_index import BadSealed, RouteTable
from wald.hints import hint_for
from wald.retention.blockers import segment_index
from wald.retention.cursors import Cursor, SlowestCursor
from wald.segments.view import View, read_view
from wald.settings import Config, RouteLimits
from wald.writing.writer import Draft

STRETCHES_MAX = 128


@dataclass(slots=True)
class Stretch:
    """The records of a route from ``first`` to ``last``; ``base`` is that of the segment of the last one."""

    base: int
    first: int
    last: int
    payload_bytes: int

    def joined(self, following: Stretch) -> Stretch:
        return Stretch(following.base, self.first, following.last, self.payload_bytes + following.payload_bytes)

    def behind(self, floor: int) -> Stretch:
        """What of it is behind ``floor``, if anything is."""
        return self._part(max(self.first, floor + 1), self.last)

    def up_to(self, floor: int) -> Stretch:
        """What of it is not, if anything is."""
        return self._part(self.first, min(self.last, floor))

    def _part(self, first: int, last: int) -> Stretch:
        payload_bytes = self.payload_bytes * (last - first + 1) // (self.last - self.first + 1)
        return Stretch(self.base, first, last, payload_bytes)


class Unread:
    """One route.

    Attributes:
        floor: up to which record nothing is counted.
        payload_bytes: that were not known to be read at the last :meth:`drop`, and what came since.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.payload_bytes = 0
        self._stretches: list[Stretch] = []
        self._read: list[Stretch] = []

    def add(self, stretch: Stretch) -> None:
        """Count records behind those that are known."""
        self.payload_bytes += stretch.payload_bytes
        _append(self._stretches, stretch)

    def follow(self, older: Unread, before: int) -> None:
        """Count what ``older`` has of the records before ``before``, and of those from it on what is known here."""
        newer = [*self._read, *self._stretches]
        self.floor, self._stretches, self.payload_bytes = older.floor, older._stretches, older.payload_bytes
        self._read = []
        for stretch in newer:
            if stretch.last >= before:
                self.add(stretch.behind(before - 1))
        self.drop(self.floor, before)

    def drop(self, floor: int, kept_from: int, is_there: Callable[[int], bool] | None = None) -> None:
        """Stop counting records up to ``floor``, and those of segments that no longer exist.

        Args:
            kept_from: the base of the first segment of which a later count needs what is read, too.
        """
        self.floor = max(self.floor, floor)
        self._read = [stretch for stretch in self._read if stretch.base >= kept_from]
        for stretch in self._stretches:
            if stretch.base >= kept_from and stretch.first <= floor:
                _append(self._read, stretch.up_to(floor))
        unread = (stretch.behind(floor) for stretch in self._stretches if stretch.last > floor)
        self._stretches = [stretch for stretch in unread if is_there is None or is_there(stretch.base)]
        self.payload_bytes = sum(stretch.payload_bytes for stretch in self._stretches)


def _append(stretches: list[Stretch], stretch: Stretch) -> None:
    """Append to a list; one that gets long is joined to half as many."""
    stretches.append(stretch)
    if len(stretches) > STRETCHES_MAX:
        pairs = zip(stretches[:-1:2], stretches[1:-1:2], strict=True)
        stretches[:] = [*(one.joined(other) for one, other in pairs), stretches[-1]]


def slowest(
    root: Root, route: str, *, log_id: bytes, head_sequence: int, known: SlowestCursor | None = None
) -> Cursor | None:
    """Return the slowest cursor of a route that counts; None if the route is retired or gone.

    Args:
        known: the result of earlier calls for this route.
    """
    if root.retired(route).exists():
        return None
    try:
        return (known or SlowestCursor()).look(root, route, log_id=log_id, head_sequence=head_sequence)
    except NotFound:
        return None


def unread_before(
    root: Root, routes: Iterable[str], *, log_id: bytes, before: int, head_sequence: int, stopping: Callable[[], bool]
) -> dict[str, Unread]:
    """What complete segments hold of ``routes`` that a group has not read; segments that cannot be read do not count.

    Args:
        before: the base of the active segment.
        stopping: whether the answer is not wanted any more.
    """
    cursors = {route: slowest(root, route, log_id=log_id, head_sequence=head_sequence) for route in routes}
    floors = {route: cursor.effective for route, cursor in cursors.items() if cursor is not None}
    found = {route: Unread(floor) for route, floor in floors.items()}
    least = min(floors.values(), default=before)
    with suppress(Damaged):
        view = read_view(root, log_id)
        for segment, following in pairwise((*view.segments, None)):
            assert segment is not None
            end = before if following is None else following.base_sequence
            if stopping() or segment.base_sequence >= before:
                break
            if end - 1 > least:
                _add(found, view, segment, floors)
    return found


def _add(found: dict[str, Unread], view: View, segment: Segment, floors: dict[str, int]) -> None:
    with suppress(Damaged, BadSealed, OSError):  # wald verify reports it
        index = view.follow(segment, lambda there: segment_index(there, view.log_id))
        for entry in RouteTable.of(index.routes):
            floor = floors.get(entry.route)
            if floor is not None and entry.last > floor:
                stretch = Stretch(segment.base_sequence, entry.first, entry.last, entry.payload_bytes)
                found[entry.route].add(stretch.behind(floor))


_LOOK_SECONDS = 0.25  # between looks at a route that is over its quota
_AGAIN_SECONDS = 0.02  # before a look that is not finished goes on, and while the indexes are read
_TURN_SECONDS = 0.002  # that a look may take
_LOOK_REST = 10  # multiple of the duration of a check that took longer
_WATCH_REST = 200  # times the duration of a look at whether cursors were moved back
_LIST_SECONDS = 1.0  # between listings of the segments, at least
_REST = 20  # times the duration of a listing, or of a count
_REPORT_SECONDS = 60.0  # between reports of the same route


class Policy(StrEnum):
    """What becomes of requests; a FIFO is not read under either."""

    BLOCK = "block"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Over:
    """A route that is over its quota.

    Attributes:
        group: that has read least; "" as long as it is not known how much is unread.
    """

    route: str
    policy: Policy
    quota_bytes: int
    group: str = ""
    unread_bytes: int = 0

    @property
    def rejects(self) -> bool:
        """Whether requests are refused; what is not known yet is waited for."""
        return self.policy is Policy.REJECT and bool(self.group)

    @property
    def message(self) -> str:
        if not self.group:
            return f"what {self.route} holds unread is being counted"
        return (
            f"route {self.route} is over its quota: group {self.group} has not read {self.unread_bytes} bytes, "
            f"pinned_max_bytes is {self.quota_bytes}"
        )

    def to_json(self) -> dict[str, object]:
        """As STAT reports it."""
        return {
            "route": self.route,
            "policy": self.policy.value,
            "quota_bytes": self.quota_bytes,
            "group": self.group,
            "unread_bytes": self.unread_bytes,
            "message": self.message,
        }


class Quotas:
    """The quotas of one life of the daemon.

    Args:
        before: the base of the active segment, which holds no record yet.

    Attributes:
        over: the routes of which nothing is taken now; always the same object.
    """

    def __init__(
        self,
        root: Root,
        config: Config,
        metrics: Metrics,
        journal: FilteringBoundLogger,
        *,
        log_id: bytes,
        before: int,
    ) -> None:
        self.over: dict[str, Over] = {}
        self._root = root
        self._metrics = metrics
        self._journal = journal
        self._log_id = log_id
        self._bases = _Bases(root)
        self._report_at: dict[str, float] = {}
        self._known: dict[str, SlowestCursor] = {}  # by route
        self._thread: threading.Thread | None = None
        self._base = before
        self._look_at = 0.0
        self._begin(config, before)

    @property
    def due(self) -> float | None:
        """When :meth:`look` has something to do, on the monotonic clock."""
        return self._look_at if self._suspects or self._thread is not None else None

    def count(self, drafts: Sequence[Draft], base: int) -> None:
        """Count what a turn has written; ``base`` is that of the segment that is active now."""
        if not self._any:
            return
        for each in drafts:
            limits = self._limits_of(each.route.name)
            if limits is not None and each.payload_bytes:
                self._add(each, limits, base)
        self._base = base

    def look(self, now: float, head_sequence: int) -> None:
        """Find out which routes are over their quota, if that is due."""
        if now >= self._watch_at and self._thread is None and self._unread:
            self._watch(now, head_sequence)
        if self.due is None or now < self._look_at:
            return
        is_loading = self._thread is not None and not self._take_loaded(now)
        self._look_at = now + (_AGAIN_SECONDS if is_loading else _LOOK_SECONDS)
        if is_loading and not self._loads_again:
            return  # those that are over their quota only because they are being counted stay so
        began = time.monotonic()
        for route in list(self._suspects):
            del self._suspects[route]  # it is the last one then, if it stays one
            self._judge(route, now, head_sequence)
            if (took := time.monotonic() - began) > _TURN_SECONDS:  # a route with very many cursors takes longer
                self._look_at = now + max(_AGAIN_SECONDS, _LOOK_REST * took)
                break
        self._metrics.over_quota = {(route, over.policy.value): over.unread_bytes for route, over in self.over.items()}

    def changes(self, config: Config) -> bool:
        """Whether other routes have a quota under ``config``, or other quotas."""
        return _quotas(config) != _quotas(self._config)

    def take_over(self, config: Config, before: int) -> None:
        """Count anew under other settings; ``before`` as of the constructor."""
        self.close()
        self._begin(config, before)

    def close(self) -> None:
        """End the thread."""
        self._unwanted.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, config: Config, before: int) -> None:
        self._config = config
        self._any = any(_quotas(config).values())
        self._base = before
        self._limits: dict[str, RouteLimits | None] = {}
        self._unread: dict[str, Unread] = {}
        self._suspects: dict[str, None] = {}  # may be over their quota; the one that is judged next comes first
        self._look_at = self._watch_at = 0.0
        self._to_watch: list[str] = []
        self._loaded: dict[str, Unread] = {}
        self._load_before, self._loads_again, self._load_began = before, False, time.monotonic()
        self._thread, self._unwanted = None, threading.Event()
        self._metrics.over_quota = {}
        self.over.clear()
        limits = {route: self._limits_of(route) for route in self._root.route_names()} if self._any else {}
        self.over |= {route: _over(route, each) for route, each in limits.items() if each is not None}
        if self.over:
            self._unread = {route: Unread(before - 1) for route in self.over}
            self._start_load(list(self.over), before - 1)

    def _watch(self, now: float, head_sequence: int) -> None:
        """Count routes again of which a group needs more than is counted; takes a part of them at a time."""
        began = time.monotonic()
        self._to_watch = self._to_watch or list(self._unread)
        again = []
        while self._to_watch and time.monotonic() < began + _TURN_SECONDS:
            route = self._to_watch.pop()
            cursor = self._slowest(route, head_sequence)
            if cursor is not None and cursor.effective < self._unread[route].floor:
                again.append(route)
        self._watch_at = now + max(_LOOK_SECONDS, _WATCH_REST * (time.monotonic() - began))
        if again:
            self._load_before, self._loads_again, self._load_began = self._base, True, now
            self._start_load(again, head_sequence)

    def _start_load(self, routes: list[str], head_sequence: int) -> None:
        arguments = routes, self._load_before, head_sequence, self._unwanted
        self._thread = threading.Thread(target=self._load, args=arguments, name="quotas")
        self._thread.start()

    def _load(self, routes: list[str], before: int, head_sequence: int, unwanted: threading.Event) -> None:
        """In the thread: count what complete segments hold."""
        self._loaded = unread_before(
            self._root,
            routes,
            log_id=self._log_id,
            before=before,
            head_sequence=head_sequence,
            stopping=unwanted.is_set,
        )

    def _take_loaded(self, now: float) -> bool:
        """Go on with what the thread has counted; False if it is still at work."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        self._thread = None
        for route, older in self._loaded.items():
            self._unread[route].follow(older, self._load_before)
        self._suspects |= dict.fromkeys([*self.over, *self._loaded])
        self._loaded = {}
        self._watch_at = max(self._watch_at, now + _REST * (now - self._load_began))
        return True

    @property
    def _kept_from(self) -> int:
        """The first segment of which what is read is kept, for a count that has begun or the next one."""
        return self._base if self._thread is None else self._load_before

    def _limits_of(self, route: str) -> RouteLimits | None:
        """Those of a route with a quota that this enforces."""
        if route not in self._limits:
            limits = self._config.limits(route)
            self._limits[route] = limits if _quota(limits) else None
        return self._limits[route]

    def _add(self, draft: Draft, limits: RouteLimits, base: int) -> None:
        route, first, last = draft.route.name, draft.base_sequence, draft.last_sequence
        if not draft.count:  # the rest of a record
            first = last = draft.continues
        unread = self._unread.get(route)
        if unread is None:
            unread = self._unread[route] = Unread()
        unread.add(Stretch(base if last >= base else self._base, first, last, draft.payload_bytes))
        if unread.payload_bytes > (limits.pinned_max_bytes or 0) and route not in self._suspects:
            self._suspects[route] = None
            self._look_at = 0.0

    def _judge(self, route: str, now: float, head_sequence: int) -> None:
        limits, unread = self._limits_of(route), self._unread.get(route)
        cursor = self._slowest(route, head_sequence)
        if limits is not None and unread is not None and cursor is not None:
            quota_bytes = limits.pinned_max_bytes or 0
            unread.drop(cursor.effective, self._kept_from)
            if unread.payload_bytes > quota_bytes:
                unread.drop(cursor.effective, self._kept_from, self._bases.now(now))
            if unread.payload_bytes > quota_bytes:
                self._suspects[route] = None
                self._enter(_over(route, limits, cursor, unread), now)
                return
        before = self.over.pop(route, None)
        if before is not None and before.group:
            self._journal.debug("route below quota", route=route)

    def _slowest(self, route: str, head_sequence: int) -> Cursor | None:
        known = self._known.setdefault(route, SlowestCursor())
        return slowest(self._root, route, log_id=self._log_id, head_sequence=head_sequence, known=known)

    def _enter(self, over: Over, now: float) -> None:
        before, self.over[over.route] = self.over.get(over.route), over
        if (before is None or not before.group) and now >= self._report_at.get(over.route, 0.0):
            self._report_at[over.route] = now + _REPORT_SECONDS
            self._journal.warning(
                "route over quota",
                what=over.message,
                policy=over.policy.value,
                hint=hint_for("route-over-quota", root=self._root.path),
            )


class _Bases:
    """The segments that exist, listed again from time to time."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._list_at = 0.0
        self._bases: set[int] = set()

    def now(self, now: float) -> Callable[[int], bool]:
        """Whether a segment, by its base, is there."""
        if now >= self._list_at:
            began = time.monotonic()
            with contextlib.suppress(Damaged):
                self._bases = {segment.base_sequence for segment in list_segments(self._root).segments}
            self._list_at = now + max(_LIST_SECONDS, _REST * (time.monotonic() - began))
        newest, bases = max(self._bases, default=0), self._bases
        return lambda base: base >= newest or base in bases


def _quota(limits: RouteLimits) -> tuple[int, str] | None:
    """The quota that this enforces; wald-reclaim enforces those that expire."""
    if not limits.pinned_max_bytes or limits.on_pinned not in set(Policy):
        return None
    return limits.pinned_max_bytes, limits.on_pinned


def _quotas(config: Config) -> dict[str, tuple[int, str] | None]:
    """The quota of each route that the settings name; of the others by "", which names none."""
    return {route: _quota(config.limits(route)) for route in ("", *config.routes)}


def _over(route: str, limits: RouteLimits, cursor: Cursor | None = None, unread: Unread | None = None) -> Over:
    group, unread_bytes = (cursor.group, unread.payload_bytes) if cursor and unread else ("", 0)
    return Over(route, Policy(limits.on_pinned), limits.pinned_max_bytes or 0, group, unread_bytes)
