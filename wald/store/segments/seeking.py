"""Places in a log as sequences: where it ends, and where a time begins."""

from __future__ import annotations

from bisect import bisect_left

from wald.errors import Damaged
from wald.store.files.directory import Root
from wald.store.segments.head import readable_head
from wald.store.segments.opened import SealedSegment, SkippedBatches
from wald.store.segments.raw import DamagedBytes
from wald.store.segments.salvage import SalvagedSegment
from wald.store.segments.view import View, read_view


def end_sequence(root: Root, log_id: bytes) -> int:
    """The number that the next record gets, as far as the durable log tells."""
    head = readable_head(root)  # which is enough, and segments may be very many
    return head.sequence + 1 if head else end_of(read_view(root, log_id))


def end_of(view: View) -> int:
    """The number of the first record behind ``view``."""
    if view.bound.sequence is not None:
        return view.bound.sequence + 1
    if not view.segments:
        return 1
    newest = view.open(view.segments[-1])
    try:
        if isinstance(newest, SalvagedSegment):
            raise newest.error
        assert isinstance(newest, SealedSegment), "without a head the newest raw segment is the bound"
        return newest.index.next_sequence
    finally:
        newest.close()


def sequence_at(view: View, time_ns: int) -> int:
    """The first record there is that was appended at ``time_ns`` or later; the end if there is none yet."""
    return _search(view, time_ns)[1]


def sequence_since(view: View, time_ns: int) -> int:
    """The sequence behind the last record older than ``time_ns``: what is missing from there on may be of that time."""
    return _search(view, time_ns)[0]


def _search(view: View, time_ns: int) -> tuple[int, int]:
    """The answers of :func:`sequence_since` and :func:`sequence_at`."""
    readable = [segment for segment in view.segments if segment.base_sequence <= view.bound.segment]

    def begins_earlier(number: int) -> bool:
        """Whether the first batch of a segment, or of the last readable one before it, is older than ``time_ns``."""
        for segment in reversed(readable[: number + 1]):
            try:
                opened = view.open(segment)
            except Damaged:
                continue
            try:
                first_ns = opened.first_time_ns(view.limit(segment))
            finally:
                opened.close()
            return first_ns is not None and first_ns < time_ns  # only the newest segment may be empty
        return True

    later = bisect_left(range(len(readable)), True, key=lambda number: not begins_earlier(number))
    # From where on records are missing that may be of that time: append times do not go back, so an older one behind
    # them ends that; None: none are, so far.
    missing = None if later else 1
    due: int | None = None  # what follows the last record met
    for segment in readable[max(0, later - 1) :]:
        base, limit = segment.base_sequence, view.limit(segment)
        if due is not None and base > due:
            missing = missing or due
        try:
            opened = view.open(segment)
        except Damaged:
            missing = missing or max(due or 0, base)
            continue
        try:
            due = base
            for met in opened.batches(opened.position_of_time(time_ns, limit), limit):
                if isinstance(met, DamagedBytes):
                    missing = missing or due
                elif isinstance(met, SkippedBatches):
                    due = met.next_sequence
                elif met.header.count and met.header.append_time_ns >= time_ns:
                    return missing or met.header.base_sequence, met.header.base_sequence
                elif met.header.count:
                    missing, due = None, met.header.end_sequence
            if opened.tail is not None and opened.tail.garbage_bytes:
                missing = missing or due
        finally:
            opened.close()
    end = end_of(view)
    return missing or end, end
