"""Reader of batches and records, optionally following the log.

Reclaimed records are an error if reading starts at a sequence, a time or a cursor. A start at "earliest", or of a group
without a cursor, skips them. Records missing without a ledger line are damage.

A follower polls the head: file events arrive before the data is durable, and never if another machine writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.uptime import read_steps
from wald.format.batch import StoredBatch, holds_pieces
from wald.format.names import DEFAULT_GROUP, SEQUENCE_MAX
from wald.format.sealed_index import RouteEntry
from wald.format.spans import Spans
from wald.reading.assembler import Assembler, Batch, OpenRecord
from wald.reading.scanner import (
    DamagedRange,
    DeletedSegment,
    DroppedRange,
    MissingRange,
    RebuiltSegment,
    Scanner,
    head_has_moved,
)
from wald.reading.selection import Selection, Start, Stop, select
from wald.retention.cursors import read_cursor
from wald.retention.history import History
from wald.retention.missing import OnMissing, ReclaimedSegment, count_missing, missing_handler, span_text
from wald.segments.durable_end import lost_head
from wald.segments.reader import SkippedBatches
from wald.segments.seek import end_of
from wald.segments.view import View, no_segment, read_view

_POLL_FIRST_SECONDS = 0.001
_POLL_LAST_SECONDS = 0.050  # 20 polls a second take about 200 µs
_JUMP_MIN_RECORDS = 1000  # a jump costs as much as scanning this number of batches
_DURABLE_NS = 2_000_000_000  # from append time to sync, which a sync interval may delay


def read_batches(
    view: View,
    *,
    route: str | None,
    start: Start,
    stop: Stop | None,
    group: str,
    limit: int | None,
    follow: bool,
    cancel: threading.Event | None,
    on_damage: Callable[[Damaged], None] | None,
    on_missing: OnMissing,
    on_wait: Callable[[], None] | None,
) -> Iterator[Batch]:
    """See :meth:`wald.log.Log.batches`."""
    selection = select(view, route, start, stop, group)
    if limit is not None and limit < 0:
        raise InvalidInput(f"the limit of {limit} records is negative", case="limit-below-zero")
    reading = _Reading(view, selection, on_damage, on_missing)
    batches = reading.batches(renew_first=True, follow=follow, cancel=cancel, on_wait=on_wait)
    return batches if limit is None else _first_records(batches, limit)


def read_selection(
    view: View,
    selection: Selection,
    *,
    on_damage: Callable[[Damaged], None] | None = None,
    on_missing: OnMissing = "error",
    cannot_match: Callable[[bytes], bool] | None = None,
) -> Iterator[Batch]:
    """Read the selected records up to the end of ``view``.

    ``cannot_match`` returns True for bytes of a sealed segment without a selected record. Their batches are not parsed,
    unless a record continues into or out of them.
    """
    return _Reading(view, selection, on_damage, on_missing, cannot_match).batches()


def read_without_waiting(
    view: View,
    *,
    route: str | None,
    start: Start,
    stop: Stop | None,
    group: str = DEFAULT_GROUP,
    since_ns: int | None = None,
    on_damage: Callable[[Damaged], None] | None = None,
    on_missing: OnMissing = None,
    resume_at: Callable[[], int] = lambda: 0,
) -> Generator[Batch | int | None]:
    """Yield batches like :func:`read_batches`, but at the end of the log, yield a sequence instead of waiting.

    All selected records up to that sequence have then been yielded; a record whose last piece is not durable yet is
    above it. None means that a step produced no batch.

    After each sequence, ``resume_at`` returns the next record that the caller may need, or 0 if it may need all.
    """
    selection = select(view, route, start, stop, group)
    if since_ns is not None:
        selection = replace(selection, from_ns=max(selection.from_ns, since_ns))
    return _Reading(view, selection, on_damage, on_missing).without_waiting(resume_at)


class _Reading:
    def __init__(
        self,
        view: View,
        selection: Selection,
        on_damage: Callable[[Damaged], None] | None,
        on_missing: OnMissing,
        cannot_match: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._root = view.root
        self._scanner: Scanner | None = None
        # A reader with an explicit start may need released segments.
        self._view = view if selection.from_earliest else view.including_released()
        self._selection = selection
        self._first = min([selection.first, *selection.floors.values()])
        self._open_sequences: dict[str, int] = {}  # by route: open record to read again
        self._last_restart: tuple[int, tuple[int, ...]] | None = None
        self._on_damage = on_damage
        self._on_missing = missing_handler(on_missing)
        self._cannot_match = cannot_match
        self._history = History(view.root)
        self._first_version = self._history.segments_version()
        self._assembler = Assembler()
        self._is_complete = False
        self._last_step: tuple[View, int] | None = None  # last clock step, in a view
        self._dropped_segment = 0  # segment whose dropped batches were reported last

    def batches(
        self,
        *,
        renew_first: bool = False,
        follow: bool = False,
        cancel: threading.Event | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> Generator[Batch]:
        """Yield the batches of the view, and with ``follow`` of later views. ``renew_first`` updates it first."""
        with self._closing():
            if renew_first:
                self._renew()
            while True:
                for batch in self._read_to_end():
                    if batch is not None:
                        yield batch
                if self._is_complete:
                    return
                if not follow:
                    self._require_head()
                    return
                if not self._await_change(cancel or threading.Event(), on_wait):
                    return
                follow = not self._has_expired()  # before renewing, so that the view is complete
                self._view = self._view.renewed()

    def without_waiting(self, resume_at: Callable[[], int]) -> Generator[Batch | int | None]:
        """See :func:`read_without_waiting`."""
        with self._closing():
            while not self._is_complete:
                self._renew()
                yield from self._read_to_end()
                self._require_head()
                last = end_of(self._view) - 1
                yield min([last, *(each.sequence - 1 for each in self._assembler.open_records.values())])
                first = resume_at()
                if first - last > _JUMP_MIN_RECORDS and not self._assembler.open_records:
                    self._close()
                    self._first, self._open_sequences = first, {}

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the scanner; report a replaced log instead of the damage in it."""
        try:
            yield
        except (Damaged, NotFound):
            self._view.require_continuity()
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._scanner is not None:
            self._scanner.close()
            self._scanner = None

    def _renew(self) -> None:
        if head_has_moved(self._view):
            self._view = self._view.renewed()

    def _read_to_end(self) -> Generator[Batch | None]:
        """Yield batches to the end of the view or selection; None is a step without a batch."""
        selection, assembler = self._selection, self._assembler
        while not self._is_complete:
            if self._scanner is None or not self._scanner.has_started:
                self._close()
                first = min([self._first, *self._open_sequences.values()])
                can_skip = None if self._cannot_match is None else self._can_skip
                self._scanner = Scanner(self._view, sequence=first, routes=selection.routes, can_skip=can_skip)
            scanner = self._scanner
            for item in scanner.advance(self._view):
                if assembler.open_records:
                    self._report_given_up(item.route if isinstance(item, StoredBatch) else None)
                if isinstance(item, StoredBatch):
                    last, header = selection.last, item.header
                    if header.append_time_ns >= selection.until_ns and not self._has_step_after(scanner.segment):
                        last = min(last, header.base_sequence - 1)
                    if selection.routes is None or item.route in selection.routes:
                        first = max(selection.floor(item.route), self._open_sequences.get(item.route, self._first))
                        for result in assembler.add(item, scanner.segment, first, last):
                            if isinstance(result, DamagedRange):
                                self._report_damage(f"{self._root.segments}: {result.message}", result.last)
                            elif selection.from_ns <= result.append_time_ns < selection.until_ns:
                                yield result
                    self._is_complete = header.end_sequence > last and not assembler.open_records
                elif isinstance(item, SkippedBatches):
                    self._is_complete = item.next_sequence > selection.last and not assembler.open_records
                elif isinstance(item, DamagedRange):
                    self._report_damaged_range(item)
                elif isinstance(item, DroppedRange):
                    self._report_dropped_range(item)
                    self._is_complete = item.last >= selection.last and not assembler.open_records
                elif isinstance(item, DeletedSegment):
                    self._report_deleted_segment(item)
                elif isinstance(item, RebuiltSegment):
                    self._restart_at(item.sequence)
                    break  # continue in a new view
                elif self._report_missing_range(item, scanner):
                    break
                if self._is_complete:
                    return
                yield None
            else:
                self._report_given_up()
                return

    def _can_skip(self, data: bytes, at: int) -> bool:
        cannot_match = self._cannot_match is not None and self._cannot_match(data)
        return cannot_match and not self._assembler.open_records and not holds_pieces(data, at)

    def _require_head(self) -> None:
        bound = self._view.bound
        if bound.head_lost and not self._is_complete and self._selection.last > (bound.sequence or 0):
            self._report_error(lost_head(self._root, bound))

    def _restart_at(self, sequence: int) -> None:
        restart = sequence, self._history.segments_version()
        repeats = restart == self._last_restart  # overlapping segments led here twice
        self._open_sequences = {} if repeats else {each.route: each.sequence for each in self._assembler.drop()}
        self._first, self._last_restart = sequence, restart
        self._close()
        self._view = self._view.renewed()

    def _report_given_up(self, route: str | None = None) -> None:
        """Report open records that a repair gave up, because later pieces may be gone."""
        open_records = [each for each in self._assembler.open_records.values() if route in (None, each.route)]
        if not open_records or self._history.segments_version() == self._first_version:
            return
        for each in open_records:
            try:
                if not self._history.is_given_up(each.sequence):
                    continue
                losses = self._history.losses(each.sequence, each.sequence)  # none if reclaimed
            except Damaged:  # a repair would have replaced a damaged ledger
                continue
            torn = self._assembler.drop([RouteEntry(each.route, 1, each.sequence, each.sequence)])
            reason = losses[0].reason if losses else ""
            self._report_missing_records(map(_as_reclaimed, torn), each.sequence, each.sequence, reason)

    def _has_step_after(self, segment: int) -> bool:
        """Return True if append times restart after a segment, so later records may be older."""
        if self._last_step is None or self._last_step[0] is not self._view:
            last = max((step.base for step in read_steps(self._root)), default=0)
            self._last_step = self._view, last
        return self._last_step[1] > segment

    def _await_change(self, cancel: threading.Event, on_wait: Callable[[], None] | None) -> bool:
        """Wait for a change or the time limit; return False if ``cancel`` is set."""
        delay = _POLL_FIRST_SECONDS
        while not head_has_moved(self._view) and not self._has_expired():
            if on_wait is not None:
                on_wait()
            if cancel.wait(delay):
                return False
            delay = min(2 * delay, _POLL_LAST_SECONDS)
        return not cancel.is_set()

    def _has_expired(self) -> bool:
        """Return True once no selected record can arrive."""
        return time.time_ns() >= self._selection.until_ns + _DURABLE_NS

    def _report_damaged_range(self, damaged: DamagedRange) -> None:
        sequences = [each.sequence for each in self._assembler.drop()]
        first, last = damaged.first, damaged.last
        spans = [", ".join(f"record {sequence}" for sequence in sequences)] if sequences else []
        if first <= min(last, self._selection.last):
            spans.append(span_text(first, last))
        if spans:
            self._report_damage(f"{damaged.message}; {' and '.join(spans)} cannot be read", max(last, *sequences, 0))
        elif damaged.whole_segment and first <= self._selection.last:
            self._report_damage(damaged.message, 0)

    def _report_missing_range(self, gap: MissingRange, scanner: Scanner) -> bool:
        """Report records that are in no segment; return True to retry in a new view.

        Reclaim may have renamed their segments before the listing, and undone the deletion since.
        """
        first, last = gap.first, gap.last
        if not self._assembler.open_records:
            last = min(last, self._selection.last)  # open records may have pieces after it
        no_segments = None
        try:
            unexplained = list(self._history.unexplained_spans(first, last))
            if unexplained:
                listed = read_view(self._root, self._view.log_id, continuity=self._view.continuity)
                view = replace(listed.including_released(), bound=self._view.bound)
                if view.listing.between(scanner.segment + 1, min(gap.last, view.bound.segment)):
                    self._view = view
                    return True
                if not view.segments and view.head is not None:
                    no_segments = no_segment(self._root, view.head.sequence)
                    raise no_segments
                unexplained = list(self._history.unexplained_spans(first, last))  # they may just have been deleted
            explained = Spans()
            reclaimed: list[ReclaimedSegment] = []
            for segment in self._history.reclaimed_segments(first, last):
                explained.add(segment.first, segment.last)
                torn = self._assembler.drop(segment.routes)
                reclaimed += [_without_pieces(segment, torn), *map(_as_reclaimed, torn)]
            reports = [(reclaimed, "")]
            for loss in self._history.losses(first, last):
                explained.add(loss.extent.first, loss.extent.last)
                # A repair removes the beginning of every record that lacks a piece.
                torn = self._assembler.drop(loss.extent.routes or ())
                reports.append(([loss.starting_extent, *map(_as_reclaimed, torn)], loss.reason))
        except Damaged as error:  # of the ledger
            if error is no_segments:  # not a loss that a consumer may skip
                raise
            self._assembler.drop()
            self._report_error(error)
            return False
        torn = [] if explained.covers(first, last) else self._assembler.drop()
        self._report_unexplained(first, last, unexplained, torn)
        for segments, reason in reports:
            self._report_missing_records(segments, first, last, reason)
        return False

    def _report_unexplained(self, first: int, last: int, gaps: list[tuple[int, int]], torn: list[OpenRecord]) -> None:
        """Report unexplained ``gaps`` from ``first`` to ``last``, and the open records ``torn`` there."""
        sequences = [each.sequence for each in torn]
        torn_names = ", ".join(f"record {sequence}" for sequence in sequences)
        for begin, end in gaps:
            if torn or begin <= self._selection.last:
                suffix = f"; {torn_names} cannot be read" if torn else ""
                missing = f"{span_text(begin, end)} {'is' if begin == end else 'are'} missing"
                message = f"{self._root.segments}: {missing}, and no ledger explains why{suffix}"
                self._report_damage(message, max(end if begin <= self._selection.last else 0, *sequences, 0))
        if torn and not gaps:
            reason = f"{span_text(first, last)} may have contained missing pieces"
            message = f"{self._root.segments}: {torn_names} cannot be read: {reason}"
            self._report_damage(message, max(sequences))

    def _report_dropped_range(self, dropped: DroppedRange) -> None:
        """Report dropped records: their range if all routes are selected, or the selected routes of the segment."""
        selection = self._selection
        first, last = dropped.first, min(dropped.last, selection.last)
        routes = dropped.routes
        try:
            losses = [] if routes is not None else self._history.losses(first, dropped.last)
            if routes is None and not losses:
                routes = self._history.dropped_entries(dropped.segment)
        except Damaged as error:
            self._assembler.drop()
            self._report_error(error)
            return
        for loss in losses:  # these records were never in this log
            self._report_missing_records([loss.starting_extent], first, last, loss.reason)
        if losses:
            return
        torn = self._assembler.drop(routes)
        if torn and routes is None:
            self._report_unexplained(first, dropped.last, [], torn)
        elif torn:
            self._report_missing_records([_as_reclaimed(each) for each in torn], first, last, "")
        reads_everything = selection.routes is None and not selection.floors
        if first > last or (dropped.segment == self._dropped_segment and not reads_everything):
            return
        if reads_everything:
            entries = [RouteEntry("", last - first + 1, first, last)]
        else:
            self._dropped_segment, last = dropped.segment, selection.last
            entries = [each for each in routes or () if selection.routes is None or each.route in selection.routes]
        if not entries:
            return
        begin, end = min(entry.first for entry in entries), max(entry.last for entry in entries)
        latest_ns = dropped.latest_ns if reads_everything else None
        reclaimed = _without_pieces(ReclaimedSegment(begin, end, tuple(entries), latest_ns=latest_ns), torn)
        self._report_missing_records([reclaimed], first, last, "")

    def _report_deleted_segment(self, deleted: DeletedSegment) -> None:
        """Report open records that lost pieces in a segment deleted before it was read completely."""
        base = deleted.segment
        try:
            sealed = self._history.sealing_of(base)
            if not self._assembler.open_records or (sealed is not None and sealed.get("raw_bytes") == deleted.position):
                return
            reclaimed = next(self._history.reclaimed_segments(base, base), None)
        except Damaged as error:
            self._assembler.drop()
            self._report_error(error)
            return
        torn = self._assembler.drop(None if reclaimed is None else reclaimed.routes)
        if reclaimed is None:
            self._report_unexplained(base, base, [], torn)
        elif torn:
            sequences = [each.sequence for each in torn]
            self._report_missing_records(map(_as_reclaimed, torn), min(sequences), max(sequences), "")

    def _report_missing_records(self, segments: Iterable[ReclaimedSegment], first: int, last: int, lost: str) -> None:
        """Report the selected records in ``segments`` as reclaimed, or as lost for the reason ``lost``."""
        selection = self._selection
        counted = count_missing(
            self._root.path,
            segments,
            selection.routes,
            first,
            last,
            floor=self._floor,
            from_ns=selection.from_ns,
            until_ns=selection.until_ns,
        )
        if counted is None:
            return
        cursor_routes = (counted.routes or selection.floors.keys()) & (selection.floors.keys() - selection.new_routes)
        missing = replace(
            counted,
            routes=frozenset(cursor_routes) or counted.routes,
            asked=bool(cursor_routes) or not (selection.from_earliest or selection.floors),
            group=selection.group if cursor_routes else None,
            archive=self._history.archive_location(counted.route, first, last),
            lost=lost,
        )
        self._view.require_continuity()
        self._on_missing(missing)

    def _floor(self, route: str) -> int:
        """Return the first record that the group needs. Reread the cursor: processed records may be reclaimed."""
        selection = self._selection
        if route not in selection.floors or route in selection.new_routes:
            return selection.floor(route)
        view = self._view.renewed()
        head_sequence = SEQUENCE_MAX if view.bound.sequence is None else view.bound.sequence
        cursor = read_cursor(self._root, route, selection.group, log_id=view.log_id, head_sequence=head_sequence)
        return max(selection.floor(route), cursor.effective + 1)

    def _report_damage(self, message: str, last: int) -> None:
        """Report damage; ``last`` is the last lost record, or 0."""
        selection = self._selection
        behind_cursor = last and selection.floors and selection.routes is not None  # reading began at the cursor
        damaged = Damaged(
            message,
            case="records-lost-behind-cursor" if behind_cursor else "records-lost",
            root=self._root.path,
            route=next(iter(selection.routes or ()), ""),
            last=last,
            group=selection.group,
        )
        damaged.last = last
        self._report_error(damaged)

    def _report_error(self, error: Damaged) -> None:
        self._view.require_continuity()  # the damage may be in another log, or an older copy
        if self._on_damage is None:
            raise error
        self._on_damage(error)


def _first_records(batches: Generator[Batch], limit: int) -> Iterator[Batch]:
    remaining = limit
    with closing(batches):
        while remaining > 0 and (batch := next(batches, None)):
            trimmed = batch.between(batch.first_sequence, batch.first_sequence + remaining - 1)
            assert trimmed is not None
            remaining -= trimmed.count
            yield trimmed


def _without_pieces(segment: ReclaimedSegment, torn: list[OpenRecord]) -> ReclaimedSegment:
    """Remove the routes of which ``segment`` had only pieces of ``torn`` records."""
    names = {each.route for each in torn}
    if not names or segment.routes is None:
        return segment
    return segment._replace(routes=tuple(each for each in segment.routes if each.count or each.route not in names))


def _as_reclaimed(record: OpenRecord) -> ReclaimedSegment:
    sequence, time_ns = record.sequence, record.header.append_time_ns
    return ReclaimedSegment(sequence, sequence, (RouteEntry(record.route, 1, sequence, sequence),), time_ns, time_ns)
