"""Scan of stored batches across segments.

A :class:`Scanner` stops at the end of a view and continues in a later view. A raw segment stays open to its end, so
sealing does not matter. Sequences have no gaps, so no missing record goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry
from wald.segments.durable_end import readable_head
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import (
    CanSkip,
    DroppedBatches,
    Misplaced,
    OpenSegment,
    RawSegment,
    SealedSegment,
    SkippedBatches,
)
from wald.segments.seek import end_of
from wald.segments.view import SegmentGone, View, recorded_end, truncated_segment


class DamagedRange(NamedTuple):
    """Unreadable records. If last < first, only a piece of a record, or control state, is lost."""

    message: str
    first: int
    last: int
    whole_segment: bool = False  # an unreadable segment is always reported


class MissingRange(NamedTuple):
    """Records that are in no segment."""

    first: int
    last: int


class DroppedRange(NamedTuple):
    """Records dropped to shrink ``segment``. If last < first, only pieces of an earlier record are dropped."""

    first: int
    last: int
    segment: int
    latest_ns: int  # append time of the last record
    routes: tuple[RouteEntry, ...] | None  # of the whole segment; None if unknown


class DeletedSegment(NamedTuple):
    """Segment deleted while an earlier copy was open. The copy ends at ``position``."""

    segment: int
    position: int


class RebuiltSegment(NamedTuple):
    """Segment that a repair rebuilt or split during the scan, which restarts at ``sequence``."""

    sequence: int


class Arrivals(NamedTuple):
    """Last durable record, and each route's first new record; None if any route may have new records."""

    routes: Mapping[str, int] | None
    last: int


ScanItem = StoredBatch | SkippedBatches | DamagedRange | MissingRange | DroppedRange | DeletedSegment | RebuiltSegment


def read_arrivals(view: View) -> Generator[Arrivals]:
    """Yield, at each step, the routes with records since the previous step; at first, any route.

    The iterator ends if the log has become shorter, because an older copy was restored.
    """
    last = end_of(view) - 1
    with closing(Scanner(view, sequence=last + 1, routes=None)) as scanner:
        for _ in scanner.advance(view):  # enter the active segment
            pass
        yield Arrivals(None, last)
        while True:
            routes: dict[str, int] | None = {}
            if head_has_moved(view):
                old, view = view.bound, view.renewed()
                last = end_of(view) - 1
                if (view.bound.segment, view.bound.position) < (old.segment, old.position):
                    return
                for item in scanner.advance(view):
                    if not isinstance(item, StoredBatch):
                        routes = None
                    elif routes is not None:
                        routes.setdefault(item.route, item.header.continues_sequence or item.header.base_sequence)
            yield Arrivals(routes, last)


def head_has_moved(view: View) -> bool:
    """Return True if the head has moved since ``view`` was taken."""
    head = readable_head(view.root)
    if head is None:
        return view.renewed().bound != view.bound
    return head != view.head


class Scanner:
    """Scanner of a log in the order of its sequences.

    It may yield batches before ``sequence``, and skip batches outside ``routes`` or accepted by ``can_skip``.
    """

    def __init__(
        self, view: View, *, sequence: int, routes: frozenset[str] | None, can_skip: CanSkip | None = None
    ) -> None:
        self._routes = routes
        self._can_skip = can_skip
        self._current: OpenSegment | None = None
        self._start_at(sequence, view)

    def _start_at(self, sequence: int, view: View) -> None:
        self._start_sequence = sequence
        self._position = 0
        self._was_active = False
        self._only_control_read = False  # only control batches were read, which a new daemon may lengthen
        self._next_sequence: int | None = None  # None before the first batch
        base = view.segments[view.listing.index_covering(sequence)].base_sequence if view.segments else sequence
        self.segment = base - 1 if base <= sequence else 0  # segments with a larger base follow
        self._pending_damage: DamagedBytes | None = None

    @property
    def has_started(self) -> bool:
        return self._next_sequence is not None or self._current is not None

    @property
    def _due(self) -> int:
        """Next selected record, which is missing if the log continues with a later record."""
        return max(self._start_sequence, self._next_sequence or 0)

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def advance(self, view: View) -> Iterator[ScanItem]:
        """Yield items up to the end of ``view``, which must not end before an earlier view."""
        while True:
            if self._current is None:
                following = self._next_segment(view)
                if following is None:
                    break
                if self._next_sequence is not None and following.base_sequence < self._next_sequence:
                    yield self._restart(view)  # split from an earlier segment
                    continue
                if self._due < following.base_sequence:
                    yield MissingRange(self._due, following.base_sequence - 1)
                    self._next_sequence = following.base_sequence
                try:
                    view = self._enter(following, view)
                except Damaged as error:
                    yield from self._report_unreadable(following, error, view)
            segment = self._current
            if segment is not None:
                yield from self._read_rest_of_segment(segment, view)
                if self._current is None:
                    continue
                if self.segment >= view.bound.segment:
                    break
                self.close()
        # The segment of the head is missing, or a repair gave up its end.
        last = view.bound.sequence
        is_ended = self._current is not None or self.segment < view.bound.segment
        if last is not None and self._due <= last and is_ended:
            yield MissingRange(self._due, last)
            self._next_sequence = last + 1
            self.segment = max(self.segment, view.bound.segment - 1)

    def _restart(self, view: View) -> RebuiltSegment:
        due = self._due
        self.close()
        self._start_at(due, view)
        return RebuiltSegment(due)

    def _next_segment(self, view: View) -> Segment | None:
        segment = view.listing.next_after(self.segment)
        return segment if segment is not None and segment.base_sequence <= view.bound.segment else None

    def _enter(self, segment: Segment, view: View) -> View:
        """Open a segment; return the view, without ``segment`` if it no longer exists."""
        try:
            opened = view.open(segment)
        except SegmentGone as error:
            return view.without(error, segment)
        limit, bound = view.limit(segment), view.bound
        self._current = opened
        self._was_active = limit is not None
        self.segment = segment.base_sequence
        if self._next_sequence is not None:
            self._position = FIRST_BATCH
        elif limit is not None and bound.sequence is not None and self._start_sequence > bound.sequence:
            self._position, self._next_sequence = limit, bound.sequence + 1
        else:
            self._position = opened.position_of_sequence(self._start_sequence, limit)
        self._only_control_read = self._position == FIRST_BATCH
        return view

    def _read_rest_of_segment(self, segment: OpenSegment, view: View) -> Iterator[ScanItem]:
        limit, is_deleted = view.bound.limit(segment.base_sequence), False
        # The writer may have continued in a copy until it cut the segment, which may now be sealed, or deleted.
        if (limit is not None or self._was_active) and segment.is_replaced(if_removed=limit is None):
            salt = segment.salt
            try:  # positions are the same in every copy and form
                reopened = view.open(Segment(segment.base_sequence, Kind.RAW, segment.path))
            except SegmentGone:
                is_deleted = limit is None
            except Damaged as error:
                self.close()
                yield from self._report_unreadable(Segment(segment.base_sequence, Kind.RAW, segment.path), error, view)
                return
            else:
                segment.close()
                segment = self._current = reopened
                if self._only_control_read:
                    self._position = FIRST_BATCH
                elif segment.salt != salt:  # a repair rebuilt it with different positions
                    yield self._restart(view)
                    return
        for item in segment.batches(self._position, limit, self._routes, self._can_skip):
            if isinstance(item, DamagedBytes):
                self._pending_damage = self._pending_damage or item
                self._position = item.offset + item.length
            elif isinstance(item, SkippedBatches):
                if (item.next_sequence > self._due or isinstance(item, DroppedBatches)) and (
                    gap := self._gap(segment, item.first_sequence, self._position)
                ):
                    yield gap
                first = max(self._due, item.first_sequence)
                self._next_sequence = max(item.next_sequence, self._next_sequence or 0)
                self._position = item.position
                yield _dropped_range(segment, item, first) if isinstance(item, DroppedBatches) else item
            else:
                header = item.header
                if not header.is_control:
                    self._only_control_read = False
                    if gap := self._gap(segment, header.base_sequence, item.position):
                        yield gap
                    self._next_sequence = header.end_sequence
                self._position = item.end
                if not header.is_control:
                    yield item
        yield from self._check_end(segment, view)
        if is_deleted:
            yield DeletedSegment(segment.base_sequence, self._position)

    def _gap(self, segment: OpenSegment, following: int, position: int = 0) -> DamagedRange | None:
        """Return the damage, or the gap in the sequence, before record ``following``."""
        damage, self._pending_damage = self._pending_damage, None
        if damage is not None:
            return DamagedRange(_damage_message(segment, damage.offset, damage.reason), self._due, following - 1)
        if self._next_sequence is not None and following > self._due:
            return DamagedRange(_damage_message(segment, position, "the sequence has a gap"), self._due, following - 1)
        return None

    def _check_end(self, segment: OpenSegment, view: View) -> Iterator[DamagedRange]:
        """Report a segment whose batches end too early."""
        bound, tail = view.bound, segment.tail
        is_last = segment.base_sequence == bound.segment
        if is_last:
            due = None if bound.sequence is None or self._position >= bound.position else bound.sequence + 1
        else:
            following = view.listing.next_after(segment.base_sequence)
            due = None if following is None else following.base_sequence
        if self._pending_damage is not None:
            if gap := self._gap(segment, due or 0):
                yield gap
        elif tail is None:
            return
        elif tail.garbage_bytes or (due and is_last):
            message = _damage_message(segment, tail.offset, tail.reason or "the file ends before the durable end")
            yield DamagedRange(message, self._due, (due or 0) - 1)
        elif is_last or not isinstance(segment, RawSegment):
            return
        else:
            end = recorded_end(view, Segment(segment.base_sequence, Kind.RAW, segment.path))
            if end <= tail.offset:
                return
            yield DamagedRange(truncated_segment(segment.path, tail.offset, end).message, self._due, (due or 0) - 1)
        if due is not None:
            self._next_sequence = max(due, self._next_sequence or 0)
        if is_last:
            self._position = bound.position

    def _report_unreadable(self, segment: Segment, error: Damaged, view: View) -> Iterator[DamagedRange]:
        """Report a segment that cannot be opened. If the first segment is misplaced, try the previous segment."""
        previous = view.listing.previous(segment)
        if isinstance(error, Misplaced) and self._next_sequence is None and previous is not None:
            self.segment = previous.base_sequence - 1
            return
        begin = max(self._due, segment.base_sequence)
        self.segment = segment.base_sequence
        following = self._next_segment(view)
        end = (view.bound.sequence or begin) + 1 if following is None else following.base_sequence
        self._next_sequence = max(end, begin)
        yield DamagedRange(error.message, begin, end - 1, whole_segment=True)


def _damage_message(segment: OpenSegment, position: int, reason: str) -> str:
    return f"{segment.path}: offset {segment.file_offset(position)}: {reason}"


def _dropped_range(segment: OpenSegment, dropped: DroppedBatches, first: int) -> DroppedRange:
    shrunk = segment.index.shrunk if isinstance(segment, SealedSegment) else None
    routes = None if shrunk is None or not shrunk.is_complete else tuple(shrunk.routes)
    return DroppedRange(first, dropped.next_sequence - 1, segment.base_sequence, dropped.latest_ns, routes)
