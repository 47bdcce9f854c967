"""Progress and lag of consumer groups.

The lag is the number of records after the cursor, up to the durable head, even released ones, which a rewound cursor
needs again. An invalid cursor counts as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, compress, pairwise
from operator import add, and_, gt, lt, mul

from wald.errors import Damaged
from wald.files.cursor_directory import cursor_creator_group
from wald.files.routes import has_fifo
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, decode_state
from wald.format.sealed_index import BadSealed, SealedIndex
from wald.retention.cursors import Cursor, read_cursors
from wald.segments.durable_end import seconds_ahead
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import SealedSegment, SegmentItem
from wald.segments.seek import end_of
from wald.segments.view import View

_NO_END = 1 << 64


@dataclass(slots=True)
class Lag:
    """Number and age of the records after ``at``, the position of a group."""

    at: int
    records: int = 0
    oldest_ns: int | None = None  # append time of the oldest record
    oldest_base: int = 0  # base of its batch
    # Estimates when a record with a future append time was written.
    written_ns: Callable[[int, int], int | None] = field(default=lambda *_: None, compare=False, repr=False)

    def seconds(self, now_ns: int) -> float:
        since_ns = self.oldest_ns
        if since_ns is not None and seconds_ahead(since_ns, now_ns):
            since_ns = self.written_ns(self.oldest_base, now_ns)
        return 0.0 if since_ns is None else max(0.0, (now_ns - since_ns) / 1e9)

    def add(self, base: int, count: int, time_ns: int) -> None:
        unread = min(count, base + count - 1 - self.at)
        if unread > 0:
            self.records += unread
            if self.oldest_ns is None:
                self.oldest_ns, self.oldest_base = time_ns, base


class LagCounter:
    """Counter of unread records. Columns avoid a Python step per route and sealed segment.

    :meth:`settle` adds the pending sums to the lags.
    """

    def __init__(self, lags_of: Callable[[str], Iterable[Lag]]) -> None:
        self._lags_of = lags_of
        self._lags: list[Lag] = []
        self._sums: list[int] = []
        self._align(())

    def add(self, index: SealedIndex) -> None:
        """Count a sealed segment; read its batches only if a cursor is inside it."""
        routes = index.routes
        if routes.names is not self._names:
            self._align(routes.names)
        # Nearly always, no group has read any of the segment.
        if self._highest < index.base_sequence and False not in self._is_dated:
            self._sums = list(map(add, self._sums, self._by_lag(routes.counts)))
            return
        has_unread = list(map(lt, self._positions, self._by_lag(routes.lasts)))
        if True not in has_unread:
            return
        is_unread = list(map(and_, self._is_dated, map(lt, self._positions, self._by_lag(routes.firsts))))
        if partly_unread := list(compress(range(len(has_unread)), map(gt, has_unread, is_unread))):
            self._add_batches(index, partly_unread)
        self._sums = list(map(add, self._sums, map(mul, is_unread, self._by_lag(routes.counts))))

    def settle(self) -> None:
        for lag, records in zip(self._lags, self._sums, strict=True):
            lag.records += records
        self._sums = [0] * len(self._lags)

    def _align(self, names: tuple[str, ...]) -> None:
        self.settle()
        numbered_lags = [(number, lag) for number, name in enumerate(names) for lag in self._lags_of(name)]
        self._names = names
        self._route_numbers = [number for number, _ in numbered_lags]  # of each lag, aligned with the lists below
        self._has_one_lag_each = self._route_numbers == list(range(len(names)))
        self._lags = [lag for _, lag in numbered_lags]
        self._positions = [lag.at for lag in self._lags]
        self._highest = max(self._positions, default=0)
        self._is_dated = [lag.oldest_ns is not None for lag in self._lags]  # the oldest unread record is known
        self._sums = [0] * len(numbered_lags)

    def _by_lag(self, column: Sequence[int]) -> Iterable[int]:
        return column if self._has_one_lag_each else map(column.__getitem__, self._route_numbers)

    def _add_batches(self, index: SealedIndex, measure_lags: Sequence[int]) -> None:
        lags_by_route: dict[int, list[Lag]] = {}
        for number in measure_lags:
            lags_by_route.setdefault(self._route_numbers[number], []).append(self._lags[number])
        table = index.batch_table()
        columns = (table.bases, table.counts, table.times_ns)
        for route, *batch in zip(table.routes, *columns, strict=True):
            for lag in lags_by_route.get(route, ()):
                lag.add(*batch)
        for number in measure_lags:
            self._is_dated[number] = self._lags[number].oldest_ns is not None

    def add_raw(self, batches: Iterable[SegmentItem]) -> Iterator[StoredBatch]:
        """Yield each batch of a raw segment after counting it."""
        for batch in batches:
            if isinstance(batch, StoredBatch) and not batch.header.is_control:
                for lag in self._lags_of(batch.route):
                    lag.add(batch.header.base_sequence, batch.header.count, batch.header.append_time_ns)
                yield batch


def measure_lags(view: View, cursors: Iterable[Cursor]) -> dict[tuple[str, str], Lag]:
    """Return the lags by (route, group), without opening segments that every group has read."""
    lags = {(cursor.route, cursor.group): Lag(cursor.effective, written_ns=view.written_ns) for cursor in cursors}
    lags_by_route: defaultdict[str, list[Lag]] = defaultdict(list)
    for (route, _), lag in lags.items():
        lags_by_route[route].append(lag)
    slowest = min((lag.at for lag in lags.values()), default=_NO_END)
    counter = LagCounter(lags_by_route.__getitem__)
    for segment, following in pairwise((*view.including_released().segments, None)):
        assert segment is not None
        if following is not None and following.base_sequence - 1 <= slowest:
            continue
        try:
            reader = view.open(segment)
        except Damaged:
            continue
        with suppress(BadSealed), closing(reader):
            if isinstance(reader, SealedSegment):
                counter.add(reader.index)
                continue
            limit, start = view.limit(segment), FIRST_BATCH
            if slowest >= segment.base_sequence:
                start = reader.position_of_sequence(slowest + 1, limit)
            for _ in counter.add_raw(reader.batches(start, limit)):
                pass
    counter.settle()
    return lags


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress on one route."""

    route: str
    last_sequence: int | None  # 0 without records; None if the end of the newest segment is damaged
    fifo: bool
    retired: bool
    cursors: tuple[Cursor, ...]
    lags: tuple[int, ...]
    consumers: str  # the OS group whose members may create cursors, or ""


def read_progress(view: View) -> list[Progress]:
    root, head_sequence = view.root, end_of(view) - 1
    last = last_sequences(view)
    cursors = {
        route: tuple(read_cursors(root, route, log_id=view.log_id, head_sequence=head_sequence))
        for route in root.route_names()
    }
    lags = measure_lags(view, chain.from_iterable(cursors.values()))
    return [
        Progress(
            route,
            last.get(route, 0),
            has_fifo(root, route),
            root.retired(route).exists(),
            route_cursors,
            tuple(lags[route, cursor.group].records for cursor in route_cursors),
            cursor_creator_group(root, route),
        )
        for route, route_cursors in cursors.items()
    ]


def last_sequences(view: View) -> dict[str, int | None]:
    """Return each route's last sequence. The newest segment begins with the state of all routes.

    After damage, a route has None until its next record.
    """
    names = view.root.route_names()
    unknown: dict[str, int | None] = dict.fromkeys(names)
    bound = view.bound
    if bound.head_lost:
        return unknown
    readable = [s for s in view.segments if s.base_sequence <= bound.segment and view.limit(s) != 0]
    lasts: dict[str, int | None] = dict.fromkeys(names, 0)
    if not readable:
        return lasts
    try:
        newest = view.open(readable[-1])
    except Damaged:
        return unknown
    with suppress(BadControl), closing(newest):
        for batch in newest.batches(FIRST_BATCH, bound.limit(newest.base_sequence)):
            if isinstance(batch, DamagedBytes):
                lasts |= unknown
            elif not isinstance(batch, StoredBatch):
                continue
            elif batch.header.is_state:
                lasts |= decode_state(batch.payload).routes
            elif batch.header.count:
                lasts[batch.route] = batch.header.last_sequence
        return lasts | unknown if newest.tail is not None and newest.tail.garbage_bytes else lasts
    return unknown
