"""Quotas on the payload bytes of a route that its slowest consumer group has not read.

Each commit round adds its records. A route above ``pinned_max_bytes`` becomes a suspect: the loop reads its cursors and
subtracts the records that every group has read. At a start, a thread counts the backlog from the indexes of complete
segments; until then, routes with a quota accept nothing. If a cursor is moved back, or a group is added, the thread
counts again while the routes stay open. The active segment has no index, so its read records are remembered.
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
_STRETCHES_MAX = 128


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
            f"route {self.route} is over its quota: group {self.group} has not read {self.unread_bytes} bytes, "
            f"pinned_max_bytes is {self.quota_bytes}"
        )


class Quotas:
    """Unread bytes of routes, and routes over quota."""

    def __init__(
        self, root: Root, config: Config, metrics: Metrics, journal: FilteringBoundLogger, *, log_id: bytes, before: int
    ) -> None:
        self.over: dict[str, OverQuota] = {}  # accept nothing now; other objects share this dictionary
        self._root = root
        self._metrics = metrics
        self._journal = journal
        self._log_id = log_id
        self._bases: set[int] = set()
        self._list_at = 0.0
        self._report_at: dict[str, float] = {}
        self._searches: dict[str, SlowestCursor] = defaultdict(SlowestCursor)
        self._counting: _Count | None = None
        self.reload(config, before)

    def reload(self, config: Config, before: int) -> None:
        """Count again under new quotas. ``before`` is the base of the active segment, which must be empty."""
        quotas = _quotas(config)
        over = {}
        for route in self._root.route_names() if any(quotas.values()) else ():
            if quota := quotas.get(route, quotas[""]):
                quota_bytes, policy = quota
                over[route] = OverQuota(route, policy, quota_bytes)
        self.close()
        self._counting = None
        self._quotas = quotas
        self._has_quotas = any(quotas.values())
        self._base = before
        self._suspects: dict[str, None] = {}  # the next to check comes first
        self._check_at = self._rewinds_at = 0.0
        self._to_check_for_rewinds: list[str] = []
        self._metrics.over_quota = {}
        self.over.clear()
        self.over |= over
        self._unread = {route: _Unread(before - 1) for route in over}
        if over:
            self._start_count(list(over), before - 1, is_first=True)

    @property
    def due(self) -> float | None:
        """Monotonic time of the next :meth:`update`."""
        return self._check_at if self._suspects or self._counting is not None else None

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
                unread = self._unread[route] = _Unread()
            unread.add(_Stretch(base if last >= base else self._base, first, last, draft.payload_bytes))
            if unread.payload_bytes > quota[0] and route not in self._suspects:
                self._suspects[route] = None
                self._check_at = 0.0
        self._base = base

    def update(self, now: float, head_sequence: int) -> None:
        """Apply a finished count, and check the suspects against the cursors."""
        if now >= self._rewinds_at and self._counting is None and self._unread:
            self._check_rewinds(now, head_sequence)
        if self.due is None or now < self._check_at:
            return
        if (count := self._counting) is not None and count.unread is not None:
            self._counting = None
            for route, counted in count.unread.items():
                self._unread[route].replace_older(counted, count.before)
            self._suspects |= dict.fromkeys([*self.over, *count.unread])
            self._rewinds_at = max(self._rewinds_at, now + _COUNT_PAUSE * count.seconds)
        self._check_at = now + (_CHECK_SECONDS if self._counting is None else _RETRY_SECONDS)
        if self._counting is not None and self._counting.is_first:
            return  # routes with a quota stay closed
        began = time.monotonic()
        for route in list(self._suspects):
            del self._suspects[route]  # a route that remains a suspect moves to the end
            self._check(route, now, head_sequence)
            if (elapsed := time.monotonic() - began) > _CHECK_MAX_SECONDS:
                self._check_at = now + max(_RETRY_SECONDS, _CHECK_PAUSE * elapsed)
                break
        self._metrics.over_quota = {(route, over.policy): over.unread_bytes for route, over in self.over.items()}

    def changes(self, config: Config) -> bool:
        return _quotas(config) != self._quotas

    def close(self) -> None:
        if self._counting is not None:
            self._counting.cancelled.set()
            self._thread.join()

    def _check_rewinds(self, now: float, head_sequence: int) -> None:
        """Recount routes with a cursor below the counted records."""
        began = time.monotonic()
        self._to_check_for_rewinds = self._to_check_for_rewinds or list(self._unread)
        rewound = []
        while self._to_check_for_rewinds and time.monotonic() < began + _CHECK_MAX_SECONDS:
            route = self._to_check_for_rewinds.pop()
            cursor = _slowest_cursor(self._root, self._log_id, route, head_sequence, self._searches[route])
            if cursor is not None and cursor.effective < self._unread[route].floor:
                rewound.append(route)
        self._rewinds_at = now + max(_CHECK_SECONDS, _REWIND_PAUSE * (time.monotonic() - began))
        if rewound:
            self._start_count(rewound, head_sequence, is_first=False)

    def _start_count(self, routes: list[str], head_sequence: int, *, is_first: bool) -> None:
        count = _Count(self._root, self._log_id, self._journal, routes, head_sequence, self._base, is_first)
        self._counting = count
        self._thread = threading.Thread(target=count.run, name="quotas")
        self._thread.start()

    def _check(self, route: str, now: float, head_sequence: int) -> None:
        """Subtract the records that every group has read; open or close the route."""
        quota, unread, before = self._quotas.get(route, self._quotas[""]), self._unread[route], self.over.get(route)
        assert quota is not None
        quota_bytes, policy = quota
        cursor = _slowest_cursor(self._root, self._log_id, route, head_sequence, self._searches[route])
        if cursor is not None:
            keep_from = self._base if self._counting is None else self._counting.before
            unread.drop(cursor.effective, keep_from)
            if unread.payload_bytes > quota_bytes:
                unread.drop(cursor.effective, keep_from, self._existing(now))
        was_over = before is not None and before.group != ""
        if cursor is None or unread.payload_bytes <= quota_bytes:
            self.over.pop(route, None)
            if was_over:
                self._journal.debug("route below quota", route=route)
            return
        self._suspects[route] = None
        over = self.over[route] = OverQuota(route, policy, quota_bytes, cursor.group, unread.payload_bytes)
        if not was_over and now >= self._report_at.get(route, 0.0):
            self._report_at[route] = now + _REPORT_SECONDS
            self._journal.warning(
                "route over quota",
                what=over.message,
                policy=policy,
                hint=hint_for("route-over-quota", root=self._root.path),
            )

    def _existing(self, now: float) -> Callable[[int], bool]:
        """Return a predicate for the bases of existing segments."""
        if now >= self._list_at:
            began = time.monotonic()
            with contextlib.suppress(Damaged, OSError):
                self._bases = {segment.base_sequence for segment in list_segments(self._root).segments}
            self._list_at = now + max(_LIST_SECONDS, _COUNT_PAUSE * (time.monotonic() - began))
        newest, bases = max(self._bases, default=0), self._bases
        return lambda base: base >= newest or base in bases


@dataclass(slots=True, eq=False)
class _Count:
    """Count of unread records below ``before``, the active segment's base."""

    _root: Root
    _log_id: bytes
    _journal: FilteringBoundLogger
    _routes: list[str]
    _head_sequence: int
    before: int
    is_first: bool
    cancelled: threading.Event = field(default_factory=threading.Event)
    unread: dict[str, _Unread] | None = None
    seconds: float = 0.0

    def run(self) -> None:
        """Count, and retry after a failure such as a lack of descriptors."""
        reported = ""
        while self.unread is None and not self.cancelled.is_set():
            began = time.monotonic()
            try:
                unread = self._count()
                self.seconds = time.monotonic() - began
                self.unread = unread
            except Exception as error:  # noqa: BLE001  (the routes would stay closed without a report)
                reason = f"{type(error).__name__}: {error}"
                if reason != reported:
                    reported = reason
                    with contextlib.suppress(Exception):  # retry even if the journal fails
                        self._journal.error("quotas not counted", reason=reason, next="retried")
                self.cancelled.wait(_RECOUNT_SECONDS)

    def _count(self) -> dict[str, _Unread]:
        unread = {}
        for route in self._routes:
            cursor = _slowest_cursor(self._root, self._log_id, route, self._head_sequence, SlowestCursor())
            if cursor is not None:
                unread[route] = _Unread(cursor.effective)
        lowest = min((each.floor for each in unread.values()), default=self.before)
        with contextlib.suppress(Damaged):
            view = read_view(self._root, self._log_id)
            segments = [segment for segment in view.segments if segment.base_sequence < self.before]
            ends = [*(segment.base_sequence for segment in segments[1:]), self.before]
            for segment, end in zip(segments, ends, strict=False):
                if self.cancelled.is_set():
                    break
                if end - 1 <= lowest:
                    continue
                with contextlib.suppress(Damaged, BadSealed, OSError):  # wald verify reports it
                    index, _ = view.follow(segment, lambda found: segment_index(found, self._log_id))
                    for route, _, first, last, payload_bytes in index.routes:
                        if route in unread and last > unread[route].floor:
                            stretch = _Stretch(segment.base_sequence, first, last, payload_bytes)
                            unread[route].add(stretch.above(unread[route].floor))
        return unread


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Range of a route's records. ``base`` is that of the segment with ``last``."""

    base: int
    first: int
    last: int
    payload_bytes: int

    def above(self, floor: int) -> _Stretch:
        """Return the records after ``floor``, with proportional bytes."""
        first = max(self.first, floor + 1)
        payload_bytes = self.payload_bytes * (self.last - first + 1) // (self.last - self.first + 1)
        return replace(self, first=first, payload_bytes=payload_bytes)


class _Unread:
    """Records of a route. Those above ``floor`` are unread."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.payload_bytes = 0
        self._stretches: list[_Stretch] = []

    def add(self, stretch: _Stretch) -> None:
        self.payload_bytes += stretch.payload_bytes
        self._stretches.append(stretch)
        if len(self._stretches) > _STRETCHES_MAX:
            pairs = zip(self._stretches[:-1:2], self._stretches[1:-1:2], strict=True)
            joined = [_Stretch(b.base, a.first, b.last, a.payload_bytes + b.payload_bytes) for a, b in pairs]
            self._stretches = [*joined, stretch]

    def replace_older(self, counted: _Unread, before: int) -> None:
        """Replace floor and records below ``before`` by those of ``counted``."""
        newer = [stretch.above(before - 1) for stretch in self._stretches if stretch.last >= before]
        self.floor, self._stretches = counted.floor, counted._stretches
        for stretch in newer:
            self.add(stretch)
        self.drop(self.floor, before)

    def drop(self, floor: int, keep_from: int, exists: Callable[[int], bool] | None = None) -> None:
        """Raise the floor. Forget read records in segments below ``keep_from``, and records of deleted segments."""
        floor = self.floor = max(self.floor, floor)
        self._stretches = [
            stretch
            for stretch in self._stretches
            if (stretch.last > floor or stretch.base >= keep_from) and (exists is None or exists(stretch.base))
        ]
        self.payload_bytes = sum(each.above(floor).payload_bytes for each in self._stretches if each.last > floor)


def _slowest_cursor(root: Root, log_id: bytes, route: str, head_sequence: int, search: SlowestCursor) -> Cursor | None:
    """Return the slowest group's cursor; None if the route is retired or gone."""
    with contextlib.suppress(NotFound):
        if not root.retired(route).exists():
            return search.find(root, route, log_id=log_id, head_sequence=head_sequence)
    return None


def _quotas(config: Config) -> dict[str, tuple[int, str] | None]:
    """Return bytes and policy by configured route; "" means all others. wald-reclaim enforces expire."""
    limits = {route: config.limits(route) for route in ("", *config.routes)}
    return {
        route: (each.pinned_max_bytes, each.on_pinned) if each.pinned_max_bytes and each.on_pinned != "expire" else None
        for route, each in limits.items()
    }
