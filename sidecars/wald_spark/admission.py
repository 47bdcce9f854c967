"""Admission: how much of what has come since is read at one trigger, so that no log starves.

Each log gets an equal share of what may be read, and what one does not need, the others get. Something is read at every
trigger: the log that is first in turn gets one record, however long it is, where no log's next one fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wald.errors import Damaged
from wald.format.parsing import StoredBatch
from wald.format.sealed import BadSealed, SealedIndex
from wald.store.files.directory import Listing, Segment, look_again
from wald.store.segments.head import Bound
from wald.store.segments.opened import OpenSegment, SealedSegment, open_segment
from wald_spark.locations import LogLocation
from wald_spark.options import Limits

_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive records that are wanted, ``count`` from ``first`` on; if none, more bytes of a long one before."""

    first: int
    count: int
    raw_bytes: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def between(self, first: int, last: int) -> Extent:
        """The records numbered so, of which there must be one; each has its share of the bytes."""
        first, last = max(first, self.first), min(last, self.last)
        count = last - first + 1
        return self if count == self.count else Extent(first, count, self.raw_bytes * count // self.count)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What has come since in one log.

    Attributes:
        start, end: it is numbered start < s ≤ end.
        extents: what of it is wanted, in order; read only as far as needed.
    """

    start: int
    end: int
    extents: Iterable[Extent]


def admit(backlogs: Sequence[Backlog], limits: Limits, *, turn: int) -> list[int]:
    """The last sequence that this trigger reads of each.

    Args:
        backlogs: none of them empty.
        turn: grows with each trigger: the logs take turns in being the first.
    """
    if limits == Limits() or not backlogs:
        return [backlog.end for backlog in backlogs]
    lanes = [_Lane(backlog.start, backlog, iter(backlog.extents)) for backlog in backlogs]
    shift = turn % len(lanes)
    in_turn = [*lanes[shift:], *lanes[:shift]]
    _share_out(in_turn, _Room.of(limits))
    if all(lane.end == lane.backlog.start for lane in lanes):
        in_turn[0].take_one()
    return [lane.end for lane in lanes]


@dataclass(slots=True)
class _Room:
    """What may still be read."""

    records: int
    raw_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> _Room:
        return cls(limits.records or _ENDLESS, limits.raw_bytes or _ENDLESS)

    def share(self, count: int) -> _Room:
        """One of ``count`` equal ones, which has room for a record where there is any."""
        return _Room(max(1, self.records // count), self.raw_bytes // count)

    def within(self, room: _Room) -> _Room:
        return _Room(min(self.records, room.records), min(self.raw_bytes, room.raw_bytes))

    def fitting(self, extent: Extent) -> Extent | None:
        """As much of ``extent`` as there is room for."""
        if extent.count <= self.records and extent.raw_bytes <= self.raw_bytes:
            return extent
        by_bytes = extent.count * self.raw_bytes // max(1, extent.raw_bytes)
        count = min(extent.count, self.records, by_bytes)
        return extent.between(extent.first, extent.first + count - 1) if count else None

    def use(self, extent: Extent) -> None:
        self.records -= extent.count
        self.raw_bytes -= extent.raw_bytes


@dataclass(slots=True)
class _Lane:
    """One log at one trigger; ``end`` is how far it has got."""

    end: int
    backlog: Backlog
    extents: Iterator[Extent]
    done: bool = False
    _next: Extent | None = None

    def take(self, share: _Room, room: _Room) -> bool:
        """As much as fits into ``share``, out of ``room``; whether that was anything."""
        taken = False
        while share.records and (extent := self._peek()) and (part := share.fitting(extent)):
            self._next = extent.between(part.last + 1, extent.last) if part.count < extent.count else None
            if part.count:
                self.end = part.last
            share.use(part)
            room.use(part)
            taken = True
        return taken

    def take_one(self) -> None:
        """One record, however long."""
        while (extent := self._peek()) and not extent.count:
            self._next = None
        if extent:
            self.end = extent.first

    def _peek(self) -> Extent | None:
        """The next run; if there is none, the end is reached."""
        if self._next is None:
            self._next = next(self.extents, None)
        if self._next is None:
            self.done, self.end = True, self.backlog.end
        return self._next


def _share_out(in_turn: Sequence[_Lane], room: _Room) -> None:
    """Rounds of equal shares; where a share is too small for any log, the last in turn waits for another trigger."""
    waiting = list(in_turn)
    while waiting and room.records:
        share = room.share(len(waiting))
        taken = [lane.take(share.within(room), room) for lane in waiting]
        waiting = [lane for lane in waiting if not lane.done]
        if not any(taken) and waiting:
            waiting.pop()


_LAST = 1 << 63


@dataclass(frozen=True, slots=True)
class _Table:
    """The batches of the wanted routes in one sealed segment, as columns."""

    base_sequence: int
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, index: SealedIndex, routes: frozenset[str] | None) -> _Table:
        table = index.batch_table()
        wanted = [number for number, entry in enumerate(index.routes) if routes is None or entry.route in routes]
        kept = np.isin(np.asarray(table.routes), wanted)
        locations = np.append(np.asarray(table.positions, np.int64), index.raw_bytes)
        columns = (np.asarray(table.bases), np.asarray(table.counts), np.diff(locations))
        return cls(index.base_sequence, *(column.astype(np.int64)[kept] for column in columns))

    def extents(self, start: int) -> Iterator[Extent]:
        """Those behind ``start``, and maybe the one that it is in."""
        lasts = self.firsts + self.counts - 1
        for row in range(int(np.searchsorted(lasts, start, side="right")), len(lasts)):
            yield Extent(int(self.firsts[row]), int(self.counts[row]), int(self.raw_bytes[row]))


class Extents:
    """The records of ``routes`` (None: all) in one log; remembers the sealed segment it was last asked about."""

    def __init__(self, location: LogLocation, routes: frozenset[str] | None) -> None:
        self._location = location
        self._routes = routes
        self._table: _Table | None = None

    def between(self, bound: Bound, listing: Listing, start: int, end: int) -> Iterator[Extent]:
        """Runs of records start < s ≤ end, in order; the records of a segment that cannot be read are one run.

        Args:
            bound, listing: as :meth:`LogLocation.look` gave them.
        """
        while True:
            try:
                for segment in listing.segments[listing.covering(start + 1) :]:
                    if segment.base_sequence > min(end, bound.segment):
                        return
                    for extent in self._in_segment(segment, listing, bound, start):
                        if extent.first > end:
                            return
                        if extent.last > start:
                            yield extent.between(start + 1, end) if extent.count else extent
                            start = extent.last
                return
            except FileNotFoundError as gone:
                listing = look_again(self._location.root, listing, gone)

    def _in_segment(self, segment: Segment, listing: Listing, bound: Bound, start: int) -> Iterator[Extent]:
        """The runs of one segment from the one on that ``start`` is in."""
        if self._table is None or self._table.base_sequence != segment.base_sequence:
            try:
                with closing(open_segment(segment, self._location.log_id)) as opened:
                    if not isinstance(opened, SealedSegment):
                        yield from self._raw(opened, bound.limit(segment.base_sequence), start)
                        return
                    self._table = _Table.of(opened.index, self._routes)
            except (Damaged, BadSealed):  # whoever reads it meets this
                behind = (other.base_sequence for other in listing.segments)
                following = min((base for base in behind if base > segment.base_sequence), default=_LAST)
                yield Extent(segment.base_sequence, following - segment.base_sequence, 0)
                return
        yield from self._table.extents(start)

    def _raw(self, segment: OpenSegment, limit: int | None, start: int) -> Iterator[Extent]:
        for met in segment.batches(segment.position_of_sequence(start + 1, limit), limit):
            wanted = isinstance(met, StoredBatch) and (self._routes is None or met.route in self._routes)
            if isinstance(met, StoredBatch) and wanted and not met.header.is_control:
                yield Extent(met.header.base_sequence, met.header.count, met.header.total_bytes)
