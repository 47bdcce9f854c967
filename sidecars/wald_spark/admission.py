"""Admission: how many new records a trigger reads, so that no log starves.

Each log gets an equal share of the limit, and other logs get the part of a share that a log does not need. Every
trigger
reads something: if the next record of every log is too long, the log whose turn it is gets one record.

Counting reads no records. A sealed segment has a table of batches in its index; of a raw one the headers are read,
starting at a position from its sparse index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.sealed_index import BadSealed, SealedIndex
from wald.segments.reader import OpenSegment, SealedSegment
from wald.segments.view import SegmentGone, View
from wald_spark.options import Limits

_ENDLESS = 1 << 62
_LAST = 1 << 63


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive wanted records, ``count`` starting at ``first``; with count 0, more bytes of an earlier record."""

    first: int
    count: int
    raw_bytes: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def between(self, first: int, last: int) -> Extent:
        """Return its records from ``first`` to ``last``, at least one, with an equal share of the bytes for each."""
        first, last = max(first, self.first), min(last, self.last)
        count = last - first + 1
        return self if count == self.count else Extent(first, count, self.raw_bytes * count // self.count)


@dataclass(frozen=True, slots=True)
class Backlog:
    """New records of one log.

    Attributes:
        start, end: start < s ≤ end.
        extents: the wanted records, in order; consumed only as far as needed.
    """

    start: int
    end: int
    extents: Iterable[Extent]


def admit(backlogs: Sequence[Backlog], limits: Limits, *, turn: int) -> list[int]:
    """Return, for each backlog, the last sequence that this trigger reads.

    Args:
        backlogs: not empty.
        turn: number of the trigger, so that the logs take turns in being the first.
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
    """Number of records and bytes that may still be read."""

    records: int
    raw_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> _Room:
        return cls(limits.records or _ENDLESS, limits.raw_bytes or _ENDLESS)

    def share(self, count: int) -> _Room:
        """Return one of ``count`` equal shares, with room for at least one record."""
        return _Room(max(1, self.records // count), self.raw_bytes // count)

    def within(self, room: _Room) -> _Room:
        return _Room(min(self.records, room.records), min(self.raw_bytes, room.raw_bytes))

    def fitting(self, extent: Extent) -> Extent | None:
        """Return the part of ``extent`` that fits; None if nothing does."""
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
    """One log at one trigger, which reads up to ``end``."""

    end: int
    backlog: Backlog
    extents: Iterator[Extent]
    done: bool = False
    _next: Extent | None = None

    def take(self, share: _Room, room: _Room) -> bool:
        """Take records that fit into ``share``, out of ``room``; return False if none fit."""
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
        """Take one record of any length."""
        while (extent := self._peek()) and not extent.count:
            self._next = None
        if extent:
            self.end = extent.first

    def _peek(self) -> Extent | None:
        """Return the next extent; None at the end."""
        if self._next is None:
            self._next = next(self.extents, None)
        if self._next is None:
            self.done, self.end = True, self.backlog.end
        return self._next


def _share_out(in_turn: Sequence[_Lane], room: _Room) -> None:
    """Give equal shares in rounds; if none fits any log, the last in turn waits for the next trigger."""
    waiting = list(in_turn)
    while waiting and room.records:
        share = room.share(len(waiting))
        taken = [lane.take(share.within(room), room) for lane in waiting]
        waiting = [lane for lane in waiting if not lane.done]
        if not any(taken) and waiting:
            waiting.pop()


@dataclass(frozen=True, slots=True)
class _Table:
    """Batches of the wanted routes in one sealed segment, as columns."""

    base_sequence: int
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, index: SealedIndex, routes: frozenset[str] | None) -> _Table:
        table = index.batch_table()
        wanted = [number for number, entry in enumerate(index.routes) if routes is None or entry.route in routes]
        kept = np.isin(np.asarray(table.routes), wanted)
        positions = np.append(np.asarray(table.positions, np.int64), index.raw_bytes)
        columns = (np.asarray(table.bases), np.asarray(table.counts), np.diff(positions))
        return cls(index.base_sequence, *(column.astype(np.int64)[kept] for column in columns))

    def extents(self, start: int) -> Iterator[Extent]:
        """Yield the extents after ``start``, and the one that contains it, if any."""
        lasts = self.firsts + self.counts - 1
        for row in range(int(np.searchsorted(lasts, start, side="right")), len(lasts)):
            yield Extent(int(self.firsts[row]), int(self.counts[row]), int(self.raw_bytes[row]))


class Extents:
    """Records of ``routes`` (None: all) in one log; caches the table of the last sealed segment."""

    def __init__(self, routes: frozenset[str] | None) -> None:
        self._routes = routes
        self._table: _Table | None = None

    def between(self, view: View, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents of records start < s ≤ end, in order; a segment that cannot be read is one extent.

        The bytes of a long record count where it begins, or in the last extent before its remaining pieces.
        """
        held: Extent | None = None
        for extent in self._behind(view, start, end):
            if extent.count:
                if extent.first > end:
                    break
                if held is not None:
                    yield held
                held = extent.between(start + 1, end)
            elif held is not None:
                held = replace(held, raw_bytes=held.raw_bytes + extent.raw_bytes)
        if held is not None:
            yield held

    def _behind(self, view: View, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents after ``start`` of segments that may have records up to ``end``, or the last one's rest."""
        number = view.listing.index_covering(start + 1)
        since = start
        while number < len(view.segments):
            segment = view.segments[number]
            if segment.base_sequence > min(end + 1, view.bound.segment):
                return
            try:
                for extent in self._in_segment(segment, view, since):
                    if extent.last > start or not extent.count:
                        yield extent
                        start = max(start, extent.last)
                number, since = number + 1, 0  # the next one may begin with the rest of a record
            except SegmentGone as gone:
                view = view.without(gone, segment)
                number, since = view.listing.index_covering(start + 1), start

    def _in_segment(self, segment: Segment, view: View, start: int) -> Iterator[Extent]:
        """Yield the extents of one segment, starting with the one that contains ``start``."""
        if self._table is None or self._table.base_sequence != segment.base_sequence:
            try:
                with closing(view.open(segment)) as opened:
                    if not isinstance(opened, SealedSegment):
                        yield from self._raw(opened, view.limit(segment), start)
                        return
                    self._table = _Table.of(opened.index, self._routes)
            except SegmentGone:
                raise
            except (Damaged, BadSealed):  # a reader of the segment meets it
                following = view.listing.next_after(segment.base_sequence)
                end = _LAST if following is None else following.base_sequence
                yield Extent(segment.base_sequence, end - segment.base_sequence, 0)
                return
        yield from self._table.extents(start)

    def _raw(self, segment: OpenSegment, limit: int | None, start: int) -> Iterator[Extent]:
        for found in segment.batches(segment.position_of_sequence(start + 1, limit), limit):
            if not isinstance(found, StoredBatch) or found.header.is_control:
                continue
            if self._routes is None or found.route in self._routes:
                yield Extent(found.header.base_sequence, found.header.count, found.header.total_bytes)
