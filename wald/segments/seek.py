"""Search for the end of the log, and for points in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.uptime import ranges_between_steps
from wald.format.batch import BatchHeader
from wald.segments.durable_end import readable_head
from wald.segments.raw_scan import DamagedBytes
from wald.segments.reader import DroppedBatches, SealedSegment, SkippedBatches
from wald.segments.salvage import SalvagedSegment
from wald.segments.view import View, read_view


def end_sequence(root: Root, log_id: bytes) -> int:
    head = readable_head(root)  # cheaper than a listing
    return head.sequence + 1 if head else end_of(read_view(root, log_id))


def end_of(view: View) -> int:
    """Return the sequence after the last record."""
    if view.bound.sequence is not None:
        return view.bound.sequence + 1
    if not view.segments:
        return 1
    with closing(view.open(view.segments[-1])) as newest:
        if isinstance(newest, SalvagedSegment):
            raise newest.error
        assert isinstance(newest, SealedSegment), "without a bound, the newest segment is sealed"
        return newest.index.next_sequence


def sequence_at(view: View, time_ns: int) -> int:
    """Return the first record appended at ``time_ns`` or later, or the end of the log."""
    return _find_first(view, time_ns)[1]


def sequence_since(view: View, time_ns: int) -> int:
    """Return the first record, even a missing one, that may have been appended at ``time_ns`` or later.

    Append times restart after a clock step: the first range of times that may have such a record counts.
    """
    return _find_first(view, time_ns)[0]


def sequence_until(view: View, time_ns: int) -> int:
    """Return the first sequence from which all records were appended at ``time_ns`` or later, despite clock steps."""
    for first, until in reversed(ranges_between_steps(view.root)):
        _, at = _search_range(view, time_ns, first, until)
        if at > first:
            return at
    return 1


def _find_first(view: View, time_ns: int) -> tuple[int, int]:
    """Return the results of :func:`sequence_since` and :func:`sequence_at`."""
    for first, until in ranges_between_steps(view.root):
        if until is not None and not _readable_segments(view, first, until):
            continue  # the range was reclaimed
        since, at = _search_range(view, time_ns, first, until)
        if until is None or since < until:
            break
    return since, at


def _search_range(view: View, time_ns: int, first: int, until: int | None) -> tuple[int, int]:
    segments = _readable_segments(view, first, until)
    first_late = bisect_left(
        range(len(segments)), True, key=lambda number: not _begins_earlier(view, segments[: number + 1], time_ns)
    )
    # First missing record that may be late enough. Append times do not decrease within a range, so records before an
    # older record are too old.
    missing = None if first_late else first
    last = (view.bound.sequence or 0) if until is None else until - 1
    for candidate in _candidates(view, segments[max(0, first_late - 1) :], time_ns, last):
        if isinstance(candidate, int):
            missing = missing or candidate
        elif candidate.append_time_ns >= time_ns:
            return missing or candidate.base_sequence, candidate.base_sequence
        else:
            missing = None
    end = until or end_of(view)
    return missing or end, end


def _readable_segments(view: View, first: int, until: int | None) -> list[Segment]:
    end, newest_base = until or 1 << 64, view.bound.segment
    return [each for each in view.segments if first <= each.base_sequence < end and each.base_sequence <= newest_base]


def _begins_earlier(view: View, segments: list[Segment], time_ns: int) -> bool:
    """Return True if the last readable segment begins before ``time_ns``, or none is readable."""
    for segment in reversed(segments):
        try:
            opened = view.open(segment)
        except Damaged:
            continue
        with closing(opened):
            first_ns = opened.first_time_ns(view.limit(segment))
        return first_ns is not None and first_ns < time_ns  # only the newest segment may be empty
    return True


def _candidates(view: View, segments: list[Segment], time_ns: int, last: int) -> Iterator[BatchHeader | int]:
    """Yield headers of batches that may be late enough, and the first sequence of each gap."""
    due: int | None = None  # next expected record
    for segment in segments:
        base, limit = segment.base_sequence, view.limit(segment)
        if due is not None and base > due:
            yield due
        try:
            opened = view.open(segment)
        except Damaged:
            yield max(due or 0, base)
            continue
        with closing(opened):
            due = base
            for item in opened.batches(opened.position_of_time(time_ns, limit), limit):
                if isinstance(item, DamagedBytes):
                    yield due
                elif isinstance(item, SkippedBatches):
                    if isinstance(item, DroppedBatches) and item.latest_ns >= time_ns:
                        yield due
                    due = item.next_sequence
                else:
                    if item.header.count:
                        yield item.header
                    due = item.header.end_sequence
            if opened.tail is not None and opened.tail.garbage_bytes:
                yield due
    if due is not None and due <= last:
        yield due
