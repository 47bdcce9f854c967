"""Search for the end of the log, and for points in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.uptime import ranges
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
        assert isinstance(newest, SealedSegment), "without a head the newest raw segment is the bound"
        return newest.index.next_sequence


def sequence_at(view: View, time_ns: int) -> int:
    """Return the first record appended at ``time_ns`` or later, or the end of the log."""
    return _first(view, time_ns)[1]


def sequence_since(view: View, time_ns: int) -> int:
    """Return the first record, even a missing one, that may be of ``time_ns`` or later.

    Append times restart after a clock step: the first range of times that may have such a record counts.
    """
    return _first(view, time_ns)[0]


def sequence_until(view: View, time_ns: int) -> int:
    """Return the first sequence at and after which no record is older than ``time_ns``, even after a clock step."""
    for first, until in reversed(ranges(view.root)):
        _, at = _search(view, time_ns, first, until)
        if at > first:
            return at
    return 1


def _first(view: View, time_ns: int) -> tuple[int, int]:
    """Return the results of :func:`sequence_since` and :func:`sequence_at`."""
    for first, until in ranges(view.root):
        if until is not None and not _readable(view, first, until):
            continue  # the range was reclaimed
        since, at = _search(view, time_ns, first, until)
        if until is None or since < until:
            break
    return since, at


def _search(view: View, time_ns: int, first: int, until: int | None) -> tuple[int, int]:
    """Search one range of times for :func:`_first`."""
    readable = _readable(view, first, until)
    later = bisect_left(
        range(len(readable)), True, key=lambda number: not _begins_earlier(view, readable[: number + 1], time_ns)
    )
    # Start of the missing records that may be late enough: none before an older record, because append times do not
    # decrease within a range.
    missing = None if later else first
    last = (view.bound.sequence or 0) if until is None else until - 1
    for found in _candidates(view, readable[max(0, later - 1) :], time_ns, last):
        if isinstance(found, int):
            missing = missing or found
        elif found.append_time_ns >= time_ns:
            return missing or found.base_sequence, found.base_sequence
        else:
            missing = None
    end = until or end_of(view)
    return missing or end, end


def _readable(view: View, first: int, until: int | None) -> list[Segment]:
    end = until or 1 << 64
    return [s for s in view.segments if first <= s.base_sequence < end and s.base_sequence <= view.bound.segment]


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
    due: int | None = None  # the next record
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
            for found in opened.batches(opened.position_of_time(time_ns, limit), limit):
                if isinstance(found, DamagedBytes):
                    yield due
                elif isinstance(found, SkippedBatches):
                    if isinstance(found, DroppedBatches) and found.latest_ns >= time_ns:
                        yield due
                    due = found.next_sequence
                else:
                    if found.header.count:
                        yield found.header
                    due = found.header.end_sequence
            if opened.tail is not None and opened.tail.garbage_bytes:
                yield due
    if due is not None and due <= last:
        yield due
