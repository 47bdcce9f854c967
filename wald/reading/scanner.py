"""Scan of stored batches across segments.

The way through a log: every stored batch from a sequence on, across segments, as far as a view reaches.

The way goes on where it ended when it is given a later view. A raw segment is kept open until its end, so that it does
not matter when it is sealed. Sequences have no gaps, so whatever is missing shows: as a :class:`DamagedRange` where
bytes are damaged, as a :class:`MissingRange` where a whole segment is not there, as a :class:`DroppedRange` where
relief has dropped batches of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import (
    DroppedBatches,
    Misplaced,
    OpenSegment,
    Passable,
    RawSegment,
    SealedSegment,
    SkippedBatches,
)
from wald.segments.view import SegmentGone, View, recorded_end, truncated


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Records ``first`` to ``last`` cannot be read; none if last < first: a piece of one is lost, or control state.

    Attributes:
        message: path, offset in the file, and what is wrong.
        whole_segment: whether a segment cannot be opened, which is reported even where no record is lost.
    """

    message: str
    first: int
    last: int
    whole_segment: bool = False


@dataclass(frozen=True, slots=True)
class MissingRange:
    """No segment holds the records ``first`` to ``last``."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """Relief has dropped the records ``first`` to ``last``; none if last < first: pieces of a record that began before.

    Attributes:
        segment: base sequence of the segment.
        latest_ns: append time of the last of them.
        routes: all that was dropped of the segment, by route; None: its index cannot be read.
    """

    first: int
    last: int
    segment: int
    latest_ns: int
    routes: tuple[RouteEntry, ...] | None


@dataclass(frozen=True, slots=True)
class DeletedSegment:
    """A segment was deleted while an earlier copy of its file was open; the batches of the copy end at ``position``."""

    segment: int
    position: int


@dataclass(frozen=True, slots=True)
class Remade:
    """A repair has made a segment again that was open, or split it. The walk begins again at record ``sequence``."""

    sequence: int


Found = StoredBatch | SkippedBatches | DamagedRange | MissingRange | DroppedRange | DeletedSegment | Remade


class Walk:
    """One way through a log, in the order of its sequences.

    Args:
        sequence: the first record wanted; batches before it may be met, too.
        routes: batches of other routes may be skipped; None: none may.
        passable: which others of a sealed segment may be skipped; None: none may.
    """

    def __init__(
        self, view: View, *, sequence: int, routes: frozenset[str] | None, passable: Passable | None = None
    ) -> None:
        self._routes = routes
        self._passable = passable
        self._current: OpenSegment | None = None
        self._begin_at(sequence, view)

    def _begin_at(self, sequence: int, view: View) -> None:
        self._wanted = sequence
        self._position = 0
        self._was_active = False
        self._only_control = False  # of the segment, only control batches were met; a start may write longer ones
        self._expected: int | None = None  # the next sequence; None until the first batch has been met
        begin = view.segments[view.listing.covering(sequence)].base_sequence if view.segments else sequence
        self._behind = begin - 1 if begin <= sequence else 0  # segments with a larger base are still to come
        self._pending: DamagedBytes | None = None

    @property
    def segment(self) -> int:
        """Base sequence of the segment of the last batch."""
        return self._behind

    @property
    def begun(self) -> bool:
        """True once a segment has been entered."""
        return self._expected is not None or self._current is not None

    @property
    def _due(self) -> int:
        """The next record wanted: if it is not there, it is missing."""
        return max(self._wanted, self._expected or 0)

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def advance(self, view: View) -> Iterator[Found]:
        """Go on to where ``view`` ends, which is not before the end of an earlier one."""
        while True:
            if self._current is None:
                following = self._following(view)
                if following is None:
                    yield from self._missing_until(view)
                    return
                if self._expected is not None and following.base_sequence < self._expected:
                    yield self._begin_again(view)  # split from a segment that was read before
                    continue
                if self._due < following.base_sequence:
                    yield MissingRange(self._due, following.base_sequence - 1)
                    self._expected = following.base_sequence
                try:
                    view = self._enter(following, view)
                except Damaged as error:
                    yield from self._unreadable(following, error, view)
            segment = self._current
            if segment is not None:
                yield from self._through(segment, view)
                if self._current is None:
                    continue
                if self._behind >= view.bound.segment:
                    yield from self._missing_behind(view)
                    return
                self.close()

    def _begin_again(self, view: View) -> Remade:
        due = self._due
        self.close()
        self._begin_at(due, view)
        return Remade(due)

    def _following(self, view: View) -> Segment | None:
        found = view.listing.behind(self._behind)
        return found if found is not None and found.base_sequence <= view.bound.segment else None

    def _enter(self, segment: Segment, view: View) -> View:
        """Open ``segment``; if it is gone, return the view without it."""
        try:
            opened = view.open(segment)
        except SegmentGone as gone:
            return view.without(gone, segment)
        limit, bound = view.limit(segment), view.bound
        self._current = opened
        self._was_active = limit is not None
        self._behind = segment.base_sequence
        if self._expected is not None:
            self._position = FIRST_BATCH
        elif limit is not None and bound.sequence is not None and self._wanted > bound.sequence:
            self._position, self._expected = limit, bound.sequence + 1
        else:
            self._position = opened.position_of_sequence(self._wanted, limit)
        self._only_control = self._position == FIRST_BATCH
        return view

    def _through(self, segment: OpenSegment, view: View) -> Iterator[Found]:
        """The rest of one segment, or as much of it as may be read."""
        limit, deleted = view.bound.limit(segment.base_sequence), False
        # The writer may have continued in a copy until it cut the segment, which may now be sealed, or deleted.
        if (limit is not None or self._was_active) and segment.replaced(removed=limit is None):
            salt = segment.salt
            try:
                segment = self._reopen(segment, view)
            except SegmentGone:
                deleted = limit is None
            except Damaged as error:
                self.close()
                yield from self._unreadable(Segment(segment.base_sequence, Kind.RAW, segment.path), error, view)
                return
            else:
                if segment.salt != salt and not self._only_control:  # positions of the other file mean nothing in it
                    yield self._begin_again(view)
                    return
        for found in segment.batches(self._position, limit, self._routes, self._passable):
            if isinstance(found, DamagedBytes):
                self._pending = self._pending or found
                self._position = found.offset + found.length
            elif isinstance(found, DroppedBatches):
                yield from self._dropped(segment, found)
            elif isinstance(found, SkippedBatches):
                if found.next_sequence > self._due:
                    yield from self._report_gap(segment, found.first_sequence, self._position)
                self._expected = max(found.next_sequence, self._expected or 0)
                self._position = found.position
                yield found
            else:
                header = found.header
                if not header.is_control:
                    self._only_control = False
                    yield from self._report_gap(segment, header.base_sequence, found.position)
                    self._expected = header.end_sequence
                self._position = found.end
                if not header.is_control:
                    yield found
        yield from self._at_end(segment, view)
        if deleted:
            yield DeletedSegment(segment.base_sequence, self._position)

    def _dropped(self, segment: OpenSegment, found: DroppedBatches) -> Iterator[DamagedRange | DroppedRange]:
        yield from self._report_gap(segment, found.first_sequence, self._position)
        relieved = segment.index.shrunk if isinstance(segment, SealedSegment) else None
        routes = None if relieved is None or not relieved.is_complete else tuple(relieved.routes)
        first = max(self._due, found.first_sequence)
        self._expected = max(found.next_sequence, self._expected or 0)
        self._position = found.position
        yield DroppedRange(first, found.next_sequence - 1, segment.base_sequence, found.latest_ns, routes)

    def _report_gap(self, segment: OpenSegment, resumed: int, position: int = 0) -> Iterator[DamagedRange]:
        """Report the damage that ends at record ``resumed``, or a jump to that record."""
        gap, self._pending = self._pending, None
        if gap is not None:
            yield DamagedRange(_message(segment, gap.offset, gap.reason), self._due, resumed - 1)
        elif self._expected is not None and resumed > self._due:
            yield DamagedRange(_message(segment, position, "the sequence jumps"), self._due, resumed - 1)

    def _at_end(self, segment: OpenSegment, view: View) -> Iterator[DamagedRange]:
        """Compare where the batches ended with where they should have."""
        bound = view.bound
        if segment.base_sequence == bound.segment:
            due = None if bound.sequence is None or self._position >= bound.position else bound.sequence + 1
        else:
            behind = view.listing.behind(segment.base_sequence)
            due = None if behind is None else behind.base_sequence
        tail = segment.tail
        if self._pending is not None:
            yield from self._report_gap(segment, due or 0)
        elif tail is not None and (tail.garbage_bytes or (due and segment.base_sequence == bound.segment)):
            message = _message(segment, tail.offset, tail.reason or "the file ends before the head")
            yield DamagedRange(message, self._due, (due or 0) - 1)
        elif tail is not None and (end := self._recorded_end(segment, view)) > tail.offset:
            yield DamagedRange(truncated(segment.path, tail.offset, end).message, self._due, (due or 0) - 1)
        else:
            return
        if due is not None:
            self._expected = max(due, self._expected or 0)
        if segment.base_sequence == bound.segment:
            self._position = bound.position

    def _recorded_end(self, segment: OpenSegment, view: View) -> int:
        """Return the position at which a complete raw segment ended when it was cut; 0 if that is not known."""
        if segment.base_sequence == view.bound.segment or not isinstance(segment, RawSegment):
            return 0
        return recorded_end(view, Segment(segment.base_sequence, Kind.RAW, segment.path))

    def _reopen(self, segment: OpenSegment, view: View) -> OpenSegment:
        """Open the file in which the segment continues: batches have the same positions in every copy and form.

        Raises:
            SegmentGone: it was deleted.
        """
        self._current = view.open(Segment(segment.base_sequence, Kind.RAW, segment.path))
        if self._only_control:
            self._position = FIRST_BATCH
        segment.close()
        return self._current

    def _unreadable(self, segment: Segment, error: Damaged, view: View) -> Iterator[DamagedRange]:
        """Report a segment that cannot be opened; the first record wanted may be in the one before a misplaced one."""
        before = view.listing.before(segment)
        if isinstance(error, Misplaced) and self._expected is None and before is not None:
            self._behind = before.base_sequence - 1
            return
        begin = max(self._due, segment.base_sequence)
        self._behind = segment.base_sequence
        following = self._following(view)
        end = (view.bound.sequence or begin) + 1 if following is None else following.base_sequence
        self._expected = max(end, begin)
        yield DamagedRange(error.message, begin, end - 1, whole_segment=True)

    def _missing_until(self, view: View) -> Iterator[MissingRange]:
        """The segment that the head stands in is not there, nor is any later one."""
        bound = view.bound
        if bound.sequence is not None and self._behind < bound.segment and self._due <= bound.sequence:
            yield MissingRange(self._due, bound.sequence)
            self._expected = bound.sequence + 1
            self._behind = bound.segment - 1

    def _missing_behind(self, view: View) -> Iterator[MissingRange]:
        """The last segment ends where the head says, and in front of the head's record: its end was given up."""
        last = view.bound.sequence
        if last is not None and self._due <= last:
            yield MissingRange(self._due, last)
            self._expected = last + 1


def _message(segment: OpenSegment, position: int, reason: str) -> str:
    return f"{segment.path}: offset {segment.file_offset(position)}: {reason}"
