"""Where a log ends for a reader of complete records: in front of the first record that has begun and not ended.

A record in several pieces is numbered where it begins; what other routes write meanwhile is numbered behind it. A range
that went further would contain those, and the record, which ends later, would be in no range at all.

The newest segment opens with the records that were open when it was begun, so the headers in that segment are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from wald.errors import Damaged, UnsupportedFormat
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, LogState, decode_state
from wald.segments.durable_end import Bound
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import OpenSegment, RawSegment, SegmentItem, SkippedBatches
from wald.segments.view import SegmentGone, View


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where a log ends.

    Attributes:
        last: number of the last record that has begun.
        begun: for each route with a record that has begun and not ended, the number of that record.
        routes: all routes that have had records, of those that were asked for; None: not known.
    """

    last: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)
    routes: frozenset[str] | None = frozenset()

    @property
    def complete(self) -> int:
        """The last sequence up to which every record is complete; 0 if there is none."""
        return min((sequence - 1 for sequence in self.begun.values()), default=self.last)


def log_end(view: View, routes: frozenset[str] | None) -> LogEnd:
    """Where ``routes`` (None: all) end.

    A record whose end is lost to damage holds back nothing: a reader of it meets the damage.

    Raises:
        UnsupportedFormat: the newest segment opens with what a newer wald has written.
        Damaged: a segment is missing.
    """
    return LogEndTracker(routes).end(view)


class LogEndTracker:
    """As :func:`log_end`, for repeated calls: only what has come since the last call is read."""

    def __init__(self, routes: frozenset[str] | None) -> None:
        self._routes = routes
        self._seen: Bound | None = None
        self._base = 0
        self._position = FIRST_BATCH  # in the segment of this base; everything in front of it has been read
        self._state = LogState()  # at that position
        self._all_routes = True  # whether the state has all routes

    def end(self, view: View) -> LogEnd:
        """What :func:`log_end` returns; if the bound has not moved, no file is read."""
        bound = view.bound
        if bound.sequence is None or bound != self._seen:  # a bound without a sequence does not show changes
            self._read_newest(view)
            self._seen = bound
        begun = self._state.open_records
        last = self._state.next_sequence - 1 if bound.sequence is None else bound.sequence
        if self._routes is None:
            return LogEnd(last, dict(begun), frozenset(self._state.routes) if self._all_routes else None)
        return LogEnd(last, {route: at for route, at in begun.items() if route in self._routes}, self._routes)

    def _read_newest(self, view: View) -> None:
        while (newest := _newest(view)) is not None:
            try:
                self._read(newest, view)
                return
            except SegmentGone as gone:
                view = view.without(gone, newest)
        self._base, self._state, self._all_routes = 0, LogState(), False

    def _read(self, newest: Segment, view: View) -> None:
        limit = view.limit(newest)
        try:
            opened = view.open(newest)
        except SegmentGone:
            raise
        except Damaged:
            self._base, self._state, self._all_routes = 0, LogState(newest.base_sequence), False
            return
        with closing(opened) as segment:
            known = newest.base_sequence == self._base and (limit is None or self._position <= limit)
            # Without a record the segment may have been made anew, and its first batch may be of another length.
            if not known or self._position == FIRST_BATCH:
                self._begin(segment)
            for found in segment.batches(self._position, limit, self._routes):
                self._apply(found)
            self._finish(segment, limit)

    def _begin(self, segment: OpenSegment) -> None:
        self._base, self._position = segment.base_sequence, FIRST_BATCH
        self._state, self._all_routes = LogState(segment.base_sequence), False
        first = next(segment.batches(FIRST_BATCH, None), None)  # durable before the segment had its name
        if not isinstance(first, StoredBatch) or not first.header.is_control:
            return
        try:
            state = decode_state(first.payload)
        except BadControl as error:
            raise UnsupportedFormat(
                f"{segment.path}: offset {segment.file_offset(first.position)}: {error}",
                hint="install a newer wald: docs/install.md",
            ) from error
        # A record that another one of its route has followed has lost its end.
        begun = {route: at for route, at in state.open_records.items() if state.routes.get(route) == at}
        self._state = LogState(segment.base_sequence, routes=state.routes, open_records=begun)
        self._all_routes = True

    def _apply(self, found: SegmentItem) -> None:
        state = self._state
        if isinstance(found, DamagedBytes):
            state.open_records.clear()  # a piece of any of them may be missing
            self._position = found.offset + found.length
        elif isinstance(found, SkippedBatches):
            state.next_sequence = max(state.next_sequence, found.next_sequence)
            self._position = found.position
        elif not found.header.is_control:
            self._position = found.end
            continued = found.header.continues_sequence
            lost = continued != 0 and state.open_records.get(found.route) != continued
            state.apply(found.header, found.route)
            if lost and not found.header.count:
                state.open_records.pop(found.route, None)  # its beginning is missing

    def _finish(self, segment: OpenSegment, limit: int | None) -> None:
        """Where a raw segment ends in damage, or too early, no record stays open."""
        tail = segment.tail if isinstance(segment, RawSegment) else None
        if tail is not None and (tail.garbage_bytes or (limit is not None and tail.offset < limit)):
            self._state.open_records.clear()
            self._position = tail.offset if limit is None else limit


def _newest(view: View) -> Segment | None:
    """The segment in which the readable bytes end; None if it is missing."""
    bound = view.bound
    readable = (segment for segment in reversed(view.segments) if segment.base_sequence <= bound.segment)
    newest = next(readable, None)
    missing = newest is not None and bound.sequence is not None and newest.base_sequence < bound.segment
    return None if missing else newest
