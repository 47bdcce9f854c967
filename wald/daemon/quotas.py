"""Quotas on the payload bytes of a route that its slowest consumer group has not read.

A commit round adds its records. For a suspect, a route above ``pinned_max_bytes``, the loop reads the cursors and
subtracts the records that every group has read. At a start a thread counts the backlog from the indexes of complete
segments; until then routes with a quota accept nothing. If a cursor is moved back, or a group added, the thread counts
again while the routes stay open. The active segment has no index, so its subtracted records are remembered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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

_CHECK_SECONDS = 0.25  # between checks of a suspect
_RETRY_SECONDS = 0.02  # before an interrupted check continues; between polls of the thread
_CHECK_MAX_SECONDS = 0.002  # of one check
# Pauses after slow work, as multiples of its duration.
_CHECK_PAUSE = 10
_REWIND_PAUSE = 200
_COUNT_PAUSE = 20
_LIST_SECONDS = 1.0  # minimum between listings of the segments
_REPORT_SECONDS = 60.0  # between log lines about the same route
_STRETCHES_MAX = 128


class Policy(StrEnum):
    """Treatment of requests above the quota; FIFOs are not read under either."""

    BLOCK = "block"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class OverQuota:
    """Route over its quota."""

    route: str
    policy: Policy
    quota_bytes: int
    group: str = ""  # the slowest; empty until the backlog has been counted
    unread_bytes: int = 0

    @property
    def rejects(self) -> bool:
        """True if requests are refused; until the backlog is counted they wait."""
        return self.policy is Policy.REJECT and bool(self.group)

    @property
    def message(self) -> str:
        if not self.group:
            return f"the unread bytes of route {self.route} are being counted"
        return (
            f"route {self.route} is over its quota: group {self.group} has not read {self.unread_bytes} bytes, "
            f"pinned_max_bytes is {self.quota_bytes}"
        )

    def to_json(self) -> dict[str, object]:
        return {
            "route": self.route,
            "policy": self.policy.value,
            "quota_bytes": self.quota_bytes,
            "group": self.group,
            "unread_bytes": self.unread_bytes,
            "message": self.message,
        }


class Quotas:
    """Routes over their quota."""

    def __init__(
        self,
        root: Root,
        config: Config,
        metrics: Metrics,
        journal: FilteringBoundLogger,
        *,
        log_id: bytes,
        before: int,  # base of the active segment, which must be empty
    ) -> None:
        self.over: dict[str, OverQuota] = {}  # accept nothing at present; others hold this dictionary
        self._root = root
        self._metrics = metrics
        self._journal = journal
        self._log_id = log_id
        self._bases: set[int] = set()  # of the segments that exist
        self._list_at = 0.0
        self._report_at: dict[str, float] = {}
        self._searches: dict[str, SlowestCursor] = {}  # by route
        self._check_at = self._rewinds_at = 0.0
        self._is_recount = False
        self._begin(config, before)

    @property
    def due(self) -> float | None:
        """Monotonic time of the next :meth:`update`."""
        return self._check_at if self._suspects or self._thread is not None else None

    def count(self, drafts: Sequence[Draft], base: int) -> None:
        """Count a round's records; ``base`` is that of the segment active after it."""
        if not self._has_quotas:
            return
        for draft in drafts:
            limits = self._limits_of(draft.route.name)
            if limits is not None and draft.payload_bytes:
                self._count(draft, limits, base)
        self._base = base

    def update(self, now: float, head_sequence: int) -> None:
        if now >= self._rewinds_at and self._thread is None and self._unread:
            self._check_rewinds(now, head_sequence)
        if self.due is None or now < self._check_at:
            return
        is_counting = self._thread is not None and not self._merge_counted(now)
        self._check_at = now + (_RETRY_SECONDS if is_counting else _CHECK_SECONDS)
        if is_counting and not self._is_recount:
            return  # the first count is running: routes with a quota stay closed
        began = time.monotonic()
        for route in list(self._suspects):
            del self._suspects[route]  # a route that remains a suspect moves to the end
            self._check(route, now, head_sequence)
            if (elapsed := time.monotonic() - began) > _CHECK_MAX_SECONDS:
                self._check_at = now + max(_RETRY_SECONDS, _CHECK_PAUSE * elapsed)
                break
        self._metrics.over_quota = {(route, over.policy.value): over.unread_bytes for route, over in self.over.items()}

    def changes(self, config: Config) -> bool:
        return _quotas(config) != _quotas(self._config)

    def reload(self, config: Config, before: int) -> None:
        self.close()
        self._begin(config, before)

    def close(self) -> None:
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, config: Config, before: int) -> None:
        self._config = config
        self._has_quotas = any(_quotas(config).values())
        self._base = before
        self._limits: dict[str, RouteLimits | None] = {}
        self._unread: dict[str, _Unread] = {}
        self._suspects: dict[str, None] = {}  # the next to check comes first
        self._check_at = self._rewinds_at = 0.0
        self._to_check_for_rewinds: list[str] = []
        self._counted: dict[str, _Unread] = {}  # the thread's result
        self._count_before, self._count_began = before, time.monotonic()
        self._is_recount = False
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._metrics.over_quota = {}
        self.over.clear()
        if self._has_quotas:
            limits = {route: self._limits_of(route) for route in self._root.route_names()}
            self.over |= {route: _over_quota(route, each) for route, each in limits.items() if each is not None}
        if self.over:
            self._unread = {route: _Unread(before - 1) for route in self.over}
            self._start_count(list(self.over), before - 1)

    def _check_rewinds(self, now: float, head_sequence: int) -> None:
        """Recount routes with a cursor below the counted records; a call checks some."""
        began = time.monotonic()
        self._to_check_for_rewinds = self._to_check_for_rewinds or list(self._unread)
        rewound = []
        while self._to_check_for_rewinds and time.monotonic() < began + _CHECK_MAX_SECONDS:
            route = self._to_check_for_rewinds.pop()
            cursor = self._slowest_cursor(route, head_sequence)
            if cursor is not None and cursor.effective < self._unread[route].floor:
                rewound.append(route)
        self._rewinds_at = now + max(_CHECK_SECONDS, _REWIND_PAUSE * (time.monotonic() - began))
        if rewound:
            self._count_before, self._is_recount, self._count_began = self._base, True, now
            self._start_count(rewound, head_sequence)

    def _start_count(self, routes: list[str], head_sequence: int) -> None:
        arguments = routes, self._count_before, head_sequence, self._cancelled
        self._thread = threading.Thread(target=self._count_segments, args=arguments, name="quotas")
        self._thread.start()

    def _count_segments(self, routes: list[str], before: int, head_sequence: int, cancelled: threading.Event) -> None:
        self._counted = _unread_before(
            self._root,
            routes,
            log_id=self._log_id,
            before=before,
            head_sequence=head_sequence,
            is_cancelled=cancelled.is_set,
        )

    def _merge_counted(self, now: float) -> bool:
        """Return False while the thread is running."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        self._thread = None
        for route, counted in self._counted.items():
            self._unread[route].replace_older(counted, self._count_before)
        self._suspects |= dict.fromkeys([*self.over, *self._counted])
        self._counted = {}
        self._rewinds_at = max(self._rewinds_at, now + _COUNT_PAUSE * (now - self._count_began))
        return True

    @property
    def _keep_from(self) -> int:
        """Base of the first segment whose dropped records a count still needs."""
        return self._base if self._thread is None else self._count_before

    def _limits_of(self, route: str) -> RouteLimits | None:
        if route not in self._limits:
            limits = self._config.limits(route)
            self._limits[route] = limits if _quota(limits) else None
        return self._limits[route]

    def _count(self, draft: Draft, limits: RouteLimits, base: int) -> None:
        route, first, last = draft.route.name, draft.base_sequence, draft.last_sequence
        if not draft.count:  # the rest of a record
            first = last = draft.continues
        unread = self._unread.get(route)
        if unread is None:
            unread = self._unread[route] = _Unread()
        unread.add(_Stretch(base if last >= base else self._base, first, last, draft.payload_bytes))
        if unread.payload_bytes > (limits.pinned_max_bytes or 0) and route not in self._suspects:
            self._suspects[route] = None
            self._check_at = 0.0

    def _check(self, route: str, now: float, head_sequence: int) -> None:
        limits, unread = self._limits_of(route), self._unread.get(route)
        cursor = self._slowest_cursor(route, head_sequence)
        if limits is not None and unread is not None and cursor is not None:
            quota_bytes = limits.pinned_max_bytes or 0
            unread.drop(cursor.effective, self._keep_from)
            if unread.payload_bytes > quota_bytes:
                unread.drop(cursor.effective, self._keep_from, self._existing(now))
            if unread.payload_bytes > quota_bytes:
                self._suspects[route] = None
                self._close_route(_over_quota(route, limits, cursor.group, unread.payload_bytes), now)
                return
        before = self.over.pop(route, None)
        if before is not None and before.group:
            self._journal.debug("route below quota", route=route)

    def _slowest_cursor(self, route: str, head_sequence: int) -> Cursor | None:
        search = self._searches.setdefault(route, SlowestCursor())
        return _slowest_cursor(self._root, route, search, log_id=self._log_id, head_sequence=head_sequence)

    def _existing(self, now: float) -> Callable[[int], bool]:
        """Return a predicate for the bases of existing segments, from a recent listing."""
        if now >= self._list_at:
            began = time.monotonic()
            with contextlib.suppress(Damaged):
                self._bases = {segment.base_sequence for segment in list_segments(self._root).segments}
            self._list_at = now + max(_LIST_SECONDS, _COUNT_PAUSE * (time.monotonic() - began))
        newest, bases = max(self._bases, default=0), self._bases
        return lambda base: base >= newest or base in bases

    def _close_route(self, over: OverQuota, now: float) -> None:
        before, self.over[over.route] = self.over.get(over.route), over
        if (before is None or not before.group) and now >= self._report_at.get(over.route, 0.0):
            self._report_at[over.route] = now + _REPORT_SECONDS
            self._journal.warning(
                "route over quota",
                what=over.message,
                policy=over.policy.value,
                hint=hint_for("route-over-quota", root=self._root.path),
            )


@dataclass(slots=True)
class _Stretch:
    """Records ``first`` to ``last`` of a route; ``base`` is of the segment of ``last``."""

    base: int
    first: int
    last: int
    payload_bytes: int

    def joined(self, following: _Stretch) -> _Stretch:
        return _Stretch(following.base, self.first, following.last, self.payload_bytes + following.payload_bytes)

    def above(self, floor: int) -> _Stretch:
        return self._part(max(self.first, floor + 1), self.last)

    def up_to(self, floor: int) -> _Stretch:
        return self._part(self.first, min(self.last, floor))

    def _part(self, first: int, last: int) -> _Stretch:
        """Return a part with proportional bytes."""
        payload_bytes = self.payload_bytes * (last - first + 1) // (self.last - self.first + 1)
        return _Stretch(self.base, first, last, payload_bytes)


class _Unread:
    """A route's records above ``floor``, unread at the last :meth:`drop` or added since."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.payload_bytes = 0
        self._stretches: list[_Stretch] = []
        self._dropped: list[_Stretch] = []

    def add(self, stretch: _Stretch) -> None:
        self.payload_bytes += stretch.payload_bytes
        _append(self._stretches, stretch)

    def replace_older(self, counted: _Unread, before: int) -> None:
        """Replace the records below ``before`` by those of ``counted``; later dropped ones count again."""
        newer = [*self._dropped, *self._stretches]
        self.floor, self._stretches, self.payload_bytes = counted.floor, counted._stretches, counted.payload_bytes
        self._dropped = []
        for stretch in newer:
            if stretch.last >= before:
                self.add(stretch.above(before - 1))
        self.drop(self.floor, before)

    def drop(self, floor: int, keep_from: int, exists: Callable[[int], bool] | None = None) -> None:
        """Drop records up to ``floor`` and of deleted segments; remember those of ``keep_from`` and later."""
        self.floor = max(self.floor, floor)
        self._dropped = [stretch for stretch in self._dropped if stretch.base >= keep_from]
        for stretch in self._stretches:
            if stretch.base >= keep_from and stretch.first <= floor:
                _append(self._dropped, stretch.up_to(floor))
        unread = (stretch.above(floor) for stretch in self._stretches if stretch.last > floor)
        self._stretches = [stretch for stretch in unread if exists is None or exists(stretch.base)]
        self.payload_bytes = sum(stretch.payload_bytes for stretch in self._stretches)


def _append(stretches: list[_Stretch], stretch: _Stretch) -> None:
    stretches.append(stretch)
    if len(stretches) > _STRETCHES_MAX:
        pairs = zip(stretches[:-1:2], stretches[1:-1:2], strict=True)
        stretches[:] = [*(one.joined(other) for one, other in pairs), stretches[-1]]


def _slowest_cursor(
    root: Root, route: str, search: SlowestCursor, *, log_id: bytes, head_sequence: int
) -> Cursor | None:
    """Return None if the route is retired or gone."""
    if root.retired(route).exists():
        return None
    try:
        return search.find(root, route, log_id=log_id, head_sequence=head_sequence)
    except NotFound:
        return None


def _unread_before(
    root: Root,
    routes: Iterable[str],
    *,
    log_id: bytes,
    before: int,
    head_sequence: int,
    is_cancelled: Callable[[], bool],
) -> dict[str, _Unread]:
    """Count unread records in the segments below ``before``, the active one's base."""
    cursors = {
        route: _slowest_cursor(root, route, SlowestCursor(), log_id=log_id, head_sequence=head_sequence)
        for route in routes
    }
    floors = {route: cursor.effective for route, cursor in cursors.items() if cursor is not None}
    counted = {route: _Unread(floor) for route, floor in floors.items()}
    lowest = min(floors.values(), default=before)
    with contextlib.suppress(Damaged):
        view = read_view(root, log_id)
        for segment, following in pairwise((*view.segments, None)):
            assert segment is not None
            end = before if following is None else following.base_sequence
            if is_cancelled() or segment.base_sequence >= before:
                break
            if end - 1 > lowest:
                _add_segment(counted, view, segment, floors)
    return counted


def _add_segment(counted: dict[str, _Unread], view: View, segment: Segment, floors: dict[str, int]) -> None:
    with contextlib.suppress(Damaged, BadSealed, OSError):  # wald verify reports it
        index = view.follow(segment, lambda moved: segment_index(moved, view.log_id))
        for entry in RouteTable.from_entries(index.routes):
            floor = floors.get(entry.route)
            if floor is not None and entry.last > floor:
                stretch = _Stretch(segment.base_sequence, entry.first, entry.last, entry.payload_bytes)
                counted[entry.route].add(stretch.above(floor))


def _quota(limits: RouteLimits) -> tuple[int, str] | None:
    """Return the quota that the daemon enforces; wald-reclaim enforces ``expire``."""
    if not limits.pinned_max_bytes or limits.on_pinned not in set(Policy):
        return None
    return limits.pinned_max_bytes, limits.on_pinned


def _quotas(config: Config) -> dict[str, tuple[int, str] | None]:
    """Return quotas by configured route; "" stands for all others."""
    return {route: _quota(config.limits(route)) for route in ("", *config.routes)}


def _over_quota(route: str, limits: RouteLimits, group: str = "", unread_bytes: int = 0) -> OverQuota:
    return OverQuota(route, Policy(limits.on_pinned), limits.pinned_max_bytes or 0, group, unread_bytes)
