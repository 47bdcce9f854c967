"""Quotas on the payload bytes of a route that its slowest consumer group has not read.

Each commit round adds its records. A route above ``pinned_max_bytes`` becomes a suspect: the loop reads its cursors and
subtracts the records that every group has read. At a start, a thread counts the backlog from the indexes of complete
segments; until then, routes with a quota accept nothing. If a cursor is moved back, or a group is added, the thread
counts again while the routes stay open. The active segment has no index, so its read records are kept in memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import Damaged, NotFound
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.sealed_index import BadSealed
from wald.hints import hint_for
from wald.retention.blockers import segment_index
from wald.retention.cursors import Cursor, SlowestCursor
from wald.segments.view import read_view
from wald.settings import Config
from wald.writing.writer import Draft

_CHECK_SECONDS = 0.25  # between checks of a suspect
_RETRY_SECONDS = 0.02  # after an interrupted check; between polls of the thread
_CHECK_MAX_SECONDS = 0.002
_RECOUNT_SECONDS = 1.0
# Pauses after slow work, as multiples of its duration.
_CHECK_PAUSE = 10
_REWIND_PAUSE = 200
_COUNT_PAUSE = 20
_LIST_SECONDS = 1.0
_REPORT_SECONDS = 60.0
_RANGES_MAX = 128


@dataclass(frozen=True, slots=True)
class OverQuota:
    """Route over its quota."""

    route: str
    policy: str  # block or reject, for requests; FIFOs are not read under either
    quota_bytes: int
    group: str = ""  # the slowest; empty until the backlog has been counted
    unread_bytes: int = 0

    @property
    def rejects(self) -> bool:
        """True if requests are refused; while the backlog is counted they wait."""
        return self.policy == "reject" and bool(self.group)

    @property
    def message(self) -> str:
        if not self.group:
            return f"the unread bytes of route {self.route} are being counted"
        return (
            f"route {self.route} is over its quota: group {self.group} has not read {self.unread_bytes} bytes; "
            f"pinned_max_bytes is {self.quota_bytes}"
        )


class Quotas:
    """Unread bytes of routes."""

    def __init__(
        self, root: Root, config: Config, metrics: Metrics, journal: FilteringBoundLogger, *, log_id: bytes, base: int
    ) -> None:
        self.over_quota: dict[str, OverQuota] = {}  # these accept nothing; other objects share this dictionary
        self._root = root
        self._metrics = metrics
        self._journal = journal
        self._log_id = log_id
        self._segment_bases: set[int] = set()
        self._list_at = 0.0
        self._report_at: dict[str, float] = {}
        self._searches: dict[str, SlowestCursor] = defaultdict(SlowestCursor)
        self._current_count: _BacklogCount | None = None
        self.reload(config, base)

    def reload(self, config: Config, base: int) -> None:
        """Count again under new quotas. ``base`` is that of the active segment, which must be empty."""
        quotas = _quotas(config)
        over_quota = {}
        for route in self._root.route_names() if any(quotas.values()) else ():
            if quota := quotas.get(route, quotas[""]):
                quota_bytes, policy = quota
                over_quota[route] = OverQuota(route, policy, quota_bytes)
        self.close()
        self._current_count = None
        self._quotas = quotas
        self._has_quotas = any(quotas.values())
        self._base = base
        self._suspects: dict[str, None] = {}  # the next to check comes first
        self._check_at = self._rewind_check_at = 0.0
        self._rewind_candidates: list[str] = []
        self._metrics.over_quota = {}
        self.over_quota.clear()
        self.over_quota |= over_quota
        self._unread = {route: _UnreadRecords(base - 1) for route in over_quota}
        if over_quota:
            self._start_count(list(over_quota), base - 1, is_first=True)

    @property
    def due_at(self) -> float | None:
        """Monotonic time of the next :meth:`update`."""
        return self._check_at if self._suspects or self._current_count is not None else None

    def count(self, drafts: Sequence[Draft], base: int) -> None:
        """Add a round's records. ``base`` is that of the segment active after the round."""
        if not self._has_quotas:
            return
        for draft in drafts:
            route = draft.route.name
            quota = self._quotas.get(route, self._quotas[""])
            if quota is None or not draft.payload_bytes:
                continue
            first, last = draft.base_sequence, draft.last_sequence
            if not draft.count:  # the rest of a record
                first = last = draft.continues
            unread = self._unread.get(route)
            if unread is None:
                unread = self._unread[route] = _UnreadRecords()
            unread.add(_RecordRange(base if last >= base else self._base, first, last, draft.payload_bytes))
            if unread.payload_bytes > quota[0] and route not in self._suspects:
                self._suspects[route] = None
                self._check_at = 0.0
        self._base = base

    def update(self, now: float, head_sequence: int) -> None:
        """Apply a finished count, and check suspects against cursors."""
        if now >= self._rewind_check_at and self._current_count is None and self._unread:
            self._check_rewinds(now, head_sequence)
        if self.due_at is None or now < self._check_at:
            return
        if (count := self._current_count) is not None and count.unread is not None:
            self._current_count = None
            for route, counted in count.unread.items():
                self._unread[route].replace_older(counted, count.base)
            self._suspects |= dict.fromkeys([*self.over_quota, *count.unread])
            self._rewind_check_at = max(self._rewind_check_at, now + _COUNT_PAUSE * count.seconds)
        self._check_at = now + (_CHECK_SECONDS if self._current_count is None else _RETRY_SECONDS)
        if self._current_count is not None and self._current_count.is_first:
            return  # routes with a quota stay closed
        start = time.monotonic()
        for route in list(self._suspects):
            del self._suspects[route]  # a route that remains a suspect moves to the end
            self._check_route(route, now, head_sequence)
            if (elapsed := time.monotonic() - start) > _CHECK_MAX_SECONDS:
                self._check_at = now + max(_RETRY_SECONDS, _CHECK_PAUSE * elapsed)
                break
        self._metrics.over_quota = {(name, each.policy): each.unread_bytes for name, each in self.over_quota.items()}

    def differ_from(self, config: Config) -> bool:
        return _quotas(config) != self._quotas

    def close(self) -> None:
        if self._current_count is not None:
            self._current_count.cancelled.set()
            self._thread.join()

    def _check_rewinds(self, now: float, head_sequence: int) -> None:
        """Recount routes with a cursor below the counted records."""
        start = time.monotonic()
        self._rewind_candidates = self._rewind_candidates or list(self._unread)
        rewound = []
        while self._rewind_candidates and time.monotonic() < start + _CHECK_MAX_SECONDS:
            route = self._rewind_candidates.pop()
            cursor = _slowest_cursor(self._root, self._log_id, route, head_sequence, self._searches[route])
            if cursor is not None and cursor.effective < self._unread[route].floor:
                rewound.append(route)
        self._rewind_check_at = now + max(_CHECK_SECONDS, _REWIND_PAUSE * (time.monotonic() - start))
        if rewound:
            self._start_count(rewound, head_sequence, is_first=False)

    def _start_count(self, routes: list[str], head_sequence: int, *, is_first: bool) -> None:
        count = _BacklogCount(self._root, self._log_id, self._journal, routes, head_sequence, self._base, is_first)
        self._current_count = count
        self._thread = threading.Thread(target=count.run, name="quotas")
        self._thread.start()

    def _check_route(self, route: str, now: float, head_sequence: int) -> None:
        """Subtract the records that every group has read; open or close the route."""
        quota, unread = self._quotas.get(route, self._quotas[""]), self._unread[route]
        assert quota is not None
        quota_bytes, policy = quota
        cursor = _slowest_cursor(self._root, self._log_id, route, head_sequence, self._searches[route])
        if cursor is not None:
            keep_from = self._base if self._current_count is None else self._current_count.base
            unread.forget(cursor.effective, keep_from)
            if unread.payload_bytes > quota_bytes:
                unread.forget(cursor.effective, keep_from, self._existing_segments(now))
        was_over = route in self.over_quota and self.over_quota[route].group != ""
        if cursor is None or unread.payload_bytes <= quota_bytes:
            self.over_quota.pop(route, None)
            if was_over:
                self._journal.debug("route below quota", route=route)
            return
        self._suspects[route] = None
        over_quota = self.over_quota[route] = OverQuota(route, policy, quota_bytes, cursor.group, unread.payload_bytes)
        if not was_over and now >= self._report_at.get(route, 0.0):
            self._report_at[route] = now + _REPORT_SECONDS
            self._journal.warning(
                "route over quota",
                what=over_quota.message,
                policy=policy,
                hint=hint_for("route-over-quota", root=self._root.path),
            )

    def _existing_segments(self, now: float) -> Callable[[int], bool]:
        """Return a predicate for the bases of existing segments."""
        if now >= self._list_at:
            start = time.monotonic()
            with contextlib.suppress(Damaged, OSError):
                self._segment_bases = {segment.base_sequence for segment in list_segments(self._root).segments}
            self._list_at = now + max(_LIST_SECONDS, _COUNT_PAUSE * (time.monotonic() - start))
        newest, bases = max(self._segment_bases, default=0), self._segment_bases
        return lambda base: base >= newest or base in bases


@dataclass(slots=True, eq=False)
class _BacklogCount:
    """Count of unread records below ``base``, that of the active segment."""

    _root: Root
    _log_id: bytes
    _journal: FilteringBoundLogger
    _routes: list[str]
    _head_sequence: int
    base: int
    is_first: bool
    cancelled: threading.Event = field(default_factory=threading.Event)
    unread: dict[str, _UnreadRecords] | None = None
    seconds: float = 0.0

    def run(self) -> None:
        """Count, and retry after a failure such as a lack of descriptors."""
        reported = ""
        while self.unread is None and not self.cancelled.is_set():
            start = time.monotonic()
            try:
                unread = self._count()
                self.seconds = time.monotonic() - start
                self.unread = unread
            except Exception as error:  # noqa: BLE001  (routes would stay closed without a report)
                reason = f"{type(error).__name__}: {error}"
                if reason != reported:
                    reported = reason
                    with contextlib.suppress(Exception):  # retry even if the journal fails
                        self._journal.error(
                            "counting unread bytes failed", reason=reason, next="the count will be retried"
                        )
                self.cancelled.wait(_RECOUNT_SECONDS)

    def _count(self) -> dict[str, _UnreadRecords]:
        unread = {}
        for route in self._routes:
            cursor = _slowest_cursor(self._root, self._log_id, route, self._head_sequence, SlowestCursor())
            if cursor is not None:
                unread[route] = _UnreadRecords(cursor.effective)
        lowest = min((each.floor for each in unread.values()), default=self.base)
        with contextlib.suppress(Damaged):
            view = read_view(self._root, self._log_id)
            segments = [segment for segment in view.segments if segment.base_sequence < self.base]
            ends = [*(segment.base_sequence for segment in segments[1:]), self.base]
            for segment, end in zip(segments, ends, strict=False):
                if self.cancelled.is_set():
                    break
                if end - 1 <= lowest:
                    continue
                with contextlib.suppress(Damaged, BadSealed, OSError):  # wald verify reports it
                    index, _ = view.follow(segment, lambda found: segment_index(found, self._log_id))
                    for route, _, first, last, payload_bytes in index.routes:
                        if route in unread and last > unread[route].floor:
                            record_range = _RecordRange(segment.base_sequence, first, last, payload_bytes)
                            unread[route].add(record_range.above(unread[route].floor))
        return unread


@dataclass(frozen=True, slots=True)
class _RecordRange:
    """Range of a route's records. ``base`` is that of the segment with ``last``."""

    base: int
    first: int
    last: int
    payload_bytes: int

    def above(self, floor: int) -> _RecordRange:
        """Return the records after ``floor``, with proportional bytes."""
        first = max(self.first, floor + 1)
        payload_bytes = self.payload_bytes * (self.last - first + 1) // (self.last - self.first + 1)
        return replace(self, first=first, payload_bytes=payload_bytes)


class _UnreadRecords:
    """Records of a route; those above ``floor`` are unread."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.payload_bytes = 0
        self._ranges: list[_RecordRange] = []

    def add(self, record_range: _RecordRange) -> None:
        self.payload_bytes += record_range.payload_bytes
        self._ranges.append(record_range)
        if len(self._ranges) > _RANGES_MAX:
            pairs = zip(self._ranges[:-1:2], self._ranges[1:-1:2], strict=True)
            merged = [_RecordRange(b.base, a.first, b.last, a.payload_bytes + b.payload_bytes) for a, b in pairs]
            self._ranges = [*merged, record_range]

    def replace_older(self, counted: _UnreadRecords, base: int) -> None:
        """Replace floor and records below ``base`` by those of ``counted``."""
        newer = [record_range.above(base - 1) for record_range in self._ranges if record_range.last >= base]
        self.floor, self._ranges = counted.floor, counted._ranges
        for record_range in newer:
            self.add(record_range)
        self.forget(self.floor, base)

    def forget(self, floor: int, keep_from: int, exists: Callable[[int], bool] | None = None) -> None:
        """Raise the floor; forget records up to it in segments below ``keep_from``, and all of deleted segments."""
        floor = self.floor = max(self.floor, floor)
        self._ranges = [
            each
            for each in self._ranges
            if (each.last > floor or each.base >= keep_from) and (exists is None or exists(each.base))
        ]
        self.payload_bytes = sum(each.above(floor).payload_bytes for each in self._ranges if each.last > floor)


def _slowest_cursor(root: Root, log_id: bytes, route: str, head_sequence: int, search: SlowestCursor) -> Cursor | None:
    """Return the slowest group's cursor; None if the route is retired or gone."""
    with contextlib.suppress(NotFound):
        if not root.retired(route).exists():
            return search.find(root, route, log_id=log_id, head_sequence=head_sequence)
    return None


def _quotas(config: Config) -> dict[str, tuple[int, str] | None]:
    """Return bytes and policy by configured route; "" means all others. wald-reclaim enforces "expire"."""
    limits = {route: config.limits(route) for route in ("", *config.routes)}
    return {
        route: (each.pinned_max_bytes, each.on_pinned) if each.pinned_max_bytes and each.on_pinned != "expire" else None
        for route, each in limits.items()
    }
