"""Snapshots of a log.

Sealing and reclaim rename files during reads, so :meth:`View.follow` tries every name of a segment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import SEGMENT_KINDS, Listing, Segment, last_changes, list_segments
from wald.files.safe_open import open_file
from wald.format.batch import StoredBatch
from wald.format.head import Head
from wald.format.log_state import decode_previous
from wald.format.names import Kind
from wald.format.segment import BadHeader
from wald.segments.continuity import Continuity
from wald.segments.durable_end import UNBOUNDED, Bound, lost_head, read_head, readable_head
from wald.segments.index_builder import find_index, next_base
from wald.segments.raw_scan import FIRST_BATCH, RawFile, ScannedBatch
from wald.segments.reader import Misplaced, OpenSegment, RawSegment, SealedSegment
from wald.segments.salvage import SalvagedSegment

T = TypeVar("T")


class State(Enum):
    """State of a record, or of its segment."""

    ACTIVE = "active"  # being written
    CUT = "cut"  # complete, not sealed yet
    SEALED = "sealed"
    RELEASED = "released"  # reclaimed; the file exists for the grace period
    QUARANTINED = "quarantined"  # damaged, or moved aside because of damage
    RECLAIMED = "reclaimed"
    ARCHIVED = "archived"  # only in a bundle
    SKIPPED = "skipped"  # a start skipped its number
    LOST = "lost"  # given up by ``wald repair``
    NOT_RESTORED = "not-restored"  # in no bundle of a restore
    NEVER_ISSUED = "never-issued"
    UNKNOWN = "unknown"  # issued, but in no segment and no ledger


class SegmentGone(Damaged):
    """Listed segment that was reclaimed or moved away."""


@dataclass(frozen=True, slots=True)
class View:
    """Immutable snapshot of a log: its head and segments."""

    root: Root
    log_id: bytes
    bound: Bound
    listing: Listing
    with_released: bool = False  # also read released segments
    head: Head | None = field(default=None, compare=False)  # source of the bound
    continuity: Continuity | None = field(default=None, compare=False)  # None: do not detect replacement

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments to read, oldest first."""
        return self.listing.segments

    def limit(self, segment: Segment) -> int | None:
        return self.bound.limit(segment.base_sequence)

    def state(self, segment: Segment) -> State:
        if segment.kind.is_reclaimed:
            return State.RELEASED
        if segment.kind is Kind.SEALED:
            return State.SEALED
        active = min(self.bound.segment, self.listing.newest_base())
        return State.ACTIVE if segment.base_sequence >= active else State.CUT

    def open(self, segment: Segment) -> OpenSegment:
        return self.follow(segment, lambda named: open_segment(named, self.log_id))

    def follow(self, segment: Segment, action: Callable[[Segment], T]) -> T:
        """Return the result of ``action`` for a segment's first existing name."""
        for kind in (segment.kind, *SEGMENT_KINDS, *SEGMENT_KINDS):  # twice: reclaim may restore an earlier name
            with suppress(FileNotFoundError):
                return action(segment.with_kind(kind))
        raise SegmentGone(
            f"{segment.path}: the segment no longer exists", case="segment-gone", directory=segment.path.parent
        )

    def including_released(self) -> View:
        return replace(self, listing=self.listing.with_released(), with_released=True)

    def renewed(self) -> View:
        """Return a current view; relist the directory only if it has changed."""
        head, listing = _checked_head(self.root, self.continuity), self.listing
        # A network file system may return cached times, so also check the head's segment.
        is_outdated = head is not None and head.segment > listing.newest_base()
        if is_outdated or listing.changed_ns is None or listing.changed_ns != last_changes(self.root):
            listing = self._list_again()
        return replace(self, bound=_bound(head, listing), listing=listing, head=head)

    def written_ns(self, sequence: int, now_ns: int) -> int | None:
        """Estimate, from file times, when a record with a future append time was written.

        A raw segment records its creation; a sealed file is created after its last record. If such a time is in the
        future too, the next segment counts.
        """
        for segment in self.segments[self.listing.index_covering(sequence) :]:
            with suppress(OSError, Damaged), open_file(segment.path) as file:
                file_ns = os.fstat(file.fileno()).st_mtime_ns
                if segment.kind.form is Kind.RAW:
                    with suppress(BadHeader):
                        file_ns = RawFile(file.fileno()).header().created_at_ns
                if file_ns <= now_ns:
                    return file_ns
        return None

    def require_continuity(self) -> None:
        if self.continuity is not None:
            self.continuity.require()

    def without(self, cause: SegmentGone, segment: Segment) -> View:
        """Return the view with a new listing. Raise Damaged if the listing still includes ``segment``."""
        listing = self._list_again()
        if any(each.base_sequence == segment.base_sequence for each in (*listing.segments, *listing.released)):
            raise Damaged(
                f"{segment.path}: the directory lists the segment, but the file does not exist",
                case="segment-file-missing",
                directory=segment.path.parent,
            ) from cause
        return replace(self, listing=listing)

    def including_restored(self, first: int, last: int) -> View:
        """Return the view with the segments from ``first`` to ``last`` whose deletion was undone."""
        listed = {segment.base_sequence for segment in self.listing.between(first, last)}
        restored = [each for each in self._list_again().between(first, last) if each.base_sequence not in listed]
        return replace(self, listing=self.listing.including(restored)) if restored else self

    def _list_again(self) -> Listing:
        listing = list_segments(self.root)
        return listing.with_released() if self.with_released else listing


def open_segment(segment: Segment, log_id: bytes) -> OpenSegment:
    """Open a segment; salvage a sealed segment if its index is damaged.

    Raise FileNotFoundError if the file was renamed, Misplaced, or Damaged if nothing is readable.
    """
    if segment.kind.form is Kind.RAW:
        return RawSegment(segment, log_id)
    try:
        return SealedSegment(segment, log_id)
    except Misplaced:
        raise
    except Damaged as error:
        return SalvagedSegment(segment, log_id, error)


def read_view(root: Root, log_id: bytes, *, bound: Bound | None = None, continuity: Continuity | None = None) -> View:
    """Return a view up to ``bound``, by default the head. Without a head, exclude the newest raw segment."""
    head = _checked_head(root, continuity) if bound is None or continuity is not None else None
    listing = list_segments(root)  # after the head, to include its segment
    if bound is not None:
        return View(root, log_id, bound, listing, continuity=continuity)
    return View(root, log_id, _bound(head, listing), listing, head=head, continuity=continuity)


def no_segment(root: Root, last: int, *, starting: bool = False) -> Damaged:
    return Damaged(
        f"{root.segments}: there is no segment, but records up to {last} were acknowledged",
        case="no-segment-at-start" if starting else "no-segment",
        root=root.path,
        path=root.segments,
    )


def durable_head(root: Root) -> Head | None:
    """Return the durable head, None before the first record; raise Damaged if it is damaged or lost."""
    head = read_head(root)
    if head is None and (listing := list_segments(root)).segments:
        bound = _bound(None, listing)
        if bound.head_lost or bound.sequence != 0:
            head = read_head(root)  # a daemon may have written it since
            if head is None:
                raise lost_head(root, bound)
    return head


def recorded_end(view: View, segment: Segment) -> int:
    """Return where a raw segment ended when it was cut; 0 if unknown.

    This reveals a truncation that removed only pieces of records, and so no sequence.
    """
    next_segment = view.listing.next_after(segment.base_sequence)
    if next_segment is None:
        return 0
    with suppress(Damaged, OSError), closing(view.open(next_segment)) as opened, open_file(segment.path) as file:
        first = next(opened.batches(FIRST_BATCH, None), None)
        if isinstance(first, StoredBatch) and first.header.is_state:
            ending = decode_previous(first.payload)
            index = partial(find_index, segment.path.parent, view.log_id, segment.base_sequence)
            # a repair gives a changed segment a new salt
            if ending is not None and ending.salt == RawFile(file.fileno(), index=index).salt:
                return ending.position
    return 0


def view_after(root: Root, log_id: bytes, base: int) -> View:
    """Return a view of only the segment after ``base``, without a full listing."""
    following = next_base(root.segments, base)
    segments = () if following is None else (Segment(following, Kind.RAW, root.segment(following, Kind.RAW)),)
    return View(root, log_id, UNBOUNDED, Listing(segments))


def truncated_segment(path: Path, position: int, end: int) -> Damaged:
    return Damaged(
        f"{path}: offset {position}: another program truncated the segment, which ended at {end} when it was cut",
        case="segment-truncated",
        root=path.parent.parent,
    )


def _checked_head(root: Root, continuity: Continuity | None) -> Head | None:
    head = readable_head(root)
    if continuity is not None:
        continuity.check(head)
    return head


def _bound(head: Head | None, listing: Listing) -> Bound:
    if head is not None:
        return Bound(head.segment, head.position, head.sequence)
    newest = next((segment for segment in reversed(listing.segments) if not segment.kind.is_reclaimed), None)
    if newest is None or newest.kind is not Kind.RAW:
        return UNBOUNDED
    head_lost, base = False, newest.base_sequence
    with suppress(FileNotFoundError, Damaged), open_file(newest.path) as file:
        scan = RawFile(file.fileno(), index=partial(find_index, newest.path.parent, None, base)).scan()
        head_lost = any(isinstance(item, ScannedBatch) and not item.header.is_control for item in scan)
    return Bound(base, 0, base - 1, head_lost=head_lost)
