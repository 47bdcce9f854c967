"""Progress and lag of consumer groups.

What each route has received, how far its groups have got, and how many records each has still to process.

The lag of a group is the number of records of its route behind its cursor that the log holds, up to the durable head:
sealed, cut, active, and released ones too, for a cursor that was moved back needs them again. What was reclaimed,
expired or lost is not counted. A cursor that cannot be trusted stands at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, pairwise
from operator import add, and_, gt, lt, mul

from wald.errors import Damaged
from wald.files.cursor_directory import cursor_owners_group
from wald.files.listing import Segment
from wald.files.routes import has_fifo
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, decode_state
from wald.format.sealed_index import BadSealed, RouteTable, SealedIndex
from wald.retention.cursors import Cursor, cursors_of
from wald.segments.durable_end import seconds_ahead
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import SealedSegment, SegmentItem
from wald.segments.seek import end_of
from wald.segments.view import View

_NO_END = 1 << 64


def _not_known(_sequence: int, _now_ns: int) -> int | None:
    return None


@dataclass(slots=True)
class Lag:
    """What is behind ``at``, the last sequence that a group has processed.

    Attributes:
        oldest_ns: append time of the first of the records; None if there is none.
        first: the sequence of the record with that time.
        written_ns: estimates when a record with an append time in the future was written, like
            :meth:`View.written_ns`.
    """

    at: int
    records: int = 0
    oldest_ns: int | None = None
    first: int = 0
    written_ns: Callable[[int, int], int | None] = field(default=_not_known, compare=False, repr=False)

    def seconds(self, now_ns: int) -> float:
        """How long the oldest of the records has been waiting."""
        since_ns = self.oldest_ns
        if since_ns is not None and seconds_ahead(since_ns, now_ns):
            since_ns = self.written_ns(self.first, now_ns)
        return 0.0 if since_ns is None else max(0.0, (now_ns - since_ns) / 1e9)

    def add(self, base: int, count: int, time_ns: int) -> None:
        """Count what is behind the cursor of the ``count`` records of one batch, of which ``base`` is the first."""
        unread = min(count, base + count - 1 - self.at)
        if unread > 0:
            self.records += unread
            if self.oldest_ns is None:
                self.oldest_ns, self.first = time_ns, base


LagsOf = Callable[[str], Iterable[Lag]]
"""The lags that records of a route add to."""


class SealedLags:
    """Counts the records of sealed segments, in columns: without a step for each route of each segment.

    Segments with the same routes, one behind the other, are added up here; :meth:`settle` passes the sums on.
    """

    def __init__(self, lags_of: LagsOf) -> None:
        self._lags_of = lags_of
        self._names: tuple[str, ...] = ()
        self._numbers: list[int] = []
        """The number of each lag's route; the lists below are likewise aligned with the lags."""
        self._once = True
        """Whether each route has one lag."""
        self._lags: list[Lag] = []
        self._ats: list[int] = []
        self._highest = 0
        self._dated: list[bool] = []
        """Whether the oldest unread record is known."""
        self._sums: list[int] = []

    def add(self, index: SealedIndex) -> None:
        """Count the records of one segment; its batches are read only if a cursor stands among them.

        Raises:
            BadSealed: they would have to be, and cannot.
        """
        routes = RouteTable.from_entries(index.routes)
        if routes.names is not self._names:
            self._align(routes.names)
        if self._highest < index.base_sequence and False not in self._dated:  # nearly always
            self._sums = list(map(add, self._sums, self._of_each(routes.counts)))
            return
        unread = list(map(lt, self._ats, self._of_each(routes.lasts)))
        if True not in unread:
            return
        whole = list(map(and_, self._dated, map(lt, self._ats, self._of_each(routes.firsts))))
        if some := list(compress(range(len(unread)), map(gt, unread, whole))):
            self._add_batches(index, some)
        self._sums = list(map(add, self._sums, map(mul, whole, self._of_each(routes.counts))))

    def settle(self) -> None:
        """Add to the lags what has been counted."""
        for lag, records in zip(self._lags, self._sums, strict=True):
            lag.records += records
        self._sums = [0] * len(self._lags)

    def _align(self, names: tuple[str, ...]) -> None:
        self.settle()
        found = [(number, lag) for number, name in enumerate(names) for lag in self._lags_of(name)]
        self._names = names
        self._numbers = [number for number, _ in found]
        self._once = self._numbers == list(range(len(names)))
        self._lags = [lag for _, lag in found]
        self._ats = [lag.at for lag in self._lags]
        self._highest = max(self._ats, default=0)
        self._dated = [lag.oldest_ns is not None for lag in self._lags]
        self._sums = [0] * len(found)

    def _of_each(self, column: Sequence[int]) -> Iterable[int]:
        """The value of its route for each lag."""
        return column if self._once else map(column.__getitem__, self._numbers)

    def _add_batches(self, index: SealedIndex, some: Sequence[int]) -> None:
        """Count batch by batch, for some of the lags."""
        wanted: dict[int, list[Lag]] = {}
        for number in some:
            wanted.setdefault(self._numbers[number], []).append(self._lags[number])
        table = index.batch_table()
        columns = (table.bases, table.counts, table.times_ns)
        for route, *batch in zip(table.routes, *columns, strict=True):
            for lag in wanted.get(route, ()):
                lag.add(*batch)
        for number in some:
            self._dated[number] = self._lags[number].oldest_ns is not None


def add_raw(batches: Iterable[SegmentItem], lags_of: LagsOf) -> Iterator[StoredBatch]:
    """Count the records of a raw segment, batch by batch; what comes out has been counted."""
    for met in batches:
        if isinstance(met, StoredBatch) and not met.header.is_control:
            for lag in lags_of(met.route):
                lag.add(met.header.base_sequence, met.header.count, met.header.append_time_ns)
            yield met


def lags(view: View, cursors: Iterable[Cursor]) -> dict[tuple[str, str], Lag]:
    """The lag of every group that has one of ``cursors``, by (route, group); what they all have read is not opened."""
    found = {(cursor.route, cursor.group): Lag(cursor.effective, written_ns=view.written_ns) for cursor in cursors}
    of_route: dict[str, list[Lag]] = {}
    for (route, _), lag in found.items():
        of_route.setdefault(route, []).append(lag)
    slowest = min((lag.at for lag in found.values()), default=_NO_END)

    def lags_of(route: str) -> list[Lag]:
        return of_route.get(route, [])

    sealed = SealedLags(lags_of)
    for segment, following in pairwise((*view.including_released().segments, None)):
        assert segment is not None
        if following is None or following.base_sequence - 1 > slowest:
            _add(segment, view, slowest, sealed, lags_of)
    sealed.settle()
    return found


def _add(segment: Segment, view: View, slowest: int, sealed: SealedLags, lags_of: LagsOf) -> None:
    try:
        opened = view.open(segment)
    except Damaged:
        return
    try:
        if isinstance(opened, SealedSegment):
            sealed.add(opened.index)
            return
        limit = view.limit(segment)
        begin = opened.position_of_sequence(slowest + 1, limit) if slowest >= segment.base_sequence else FIRST_BATCH
        for _ in add_raw(opened.batches(begin, limit), lags_of):
            pass
    except BadSealed:
        return
    finally:
        opened.close()


@dataclass(frozen=True, slots=True)
class Progress:
    """One route.

    Attributes:
        last_sequence: of its records; 0: none yet; None: not known, for the newest segment is damaged behind it.
        cursors: one per group; an absent one of the default group if there is none.
        lags: of each of them, records, in the same order.
        consumers: the group whose members may leave cursors; "" if there is none.
    """

    route: str
    last_sequence: int | None
    fifo: bool
    retired: bool
    cursors: tuple[Cursor, ...]
    lags: tuple[int, ...]
    consumers: str


def progress(view: View) -> list[Progress]:
    """Every route, by name.

    Raises:
        Damaged: the end of the log is not known.
    """
    root, head_sequence = view.root, end_of(view) - 1
    last = last_sequences(view)
    cursors = {
        route: tuple(cursors_of(root, route, log_id=view.log_id, head_sequence=head_sequence))
        for route in root.route_names()
    }
    found = lags(view, chain.from_iterable(cursors.values()))
    return [
        Progress(
            route,
            last.get(route, 0),
            has_fifo(root, route),
            root.retired(route).exists(),
            of_route,
            tuple(found[route, cursor.group].records for cursor in of_route),
            cursor_owners_group(root, route),
        )
        for route, of_route in cursors.items()
    ]


def last_sequences(view: View) -> dict[str, int | None]:
    """Of each route, from the newest segment alone, which opens with what the older ones led to; None: not known.

    Which routes have lost records where that is damaged is not known; records behind the damage make theirs known.
    """
    names = view.root.route_names()
    unknown: dict[str, int | None] = dict.fromkeys(names)
    bound = view.bound
    if bound.lost:
        return unknown
    readable = [s for s in view.segments if s.base_sequence <= bound.segment and view.limit(s) != 0]
    found: dict[str, int | None] = dict.fromkeys(names, 0)
    if not readable:
        return found
    try:
        newest = view.open(readable[-1])
    except Damaged:
        return unknown
    try:
        for batch in newest.batches(FIRST_BATCH, bound.limit(newest.base_sequence)):
            if isinstance(batch, DamagedBytes):
                found |= unknown
            elif not isinstance(batch, StoredBatch):
                continue
            elif batch.header.is_state:
                found |= decode_state(batch.payload).routes
            elif batch.header.count:
                found[batch.route] = batch.header.last_sequence
        if newest.tail is not None and newest.tail.garbage_bytes:
            found |= unknown
    except BadControl:
        return unknown
    finally:
        newest.close()
    return found
