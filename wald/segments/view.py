"""Snapshot of a log: its head and its segments.

A log as it was at one moment: how far it may be read, and which segments hold it.

Everything that reads takes a :class:`View`; nothing else lists the directory to read. Files change their names under a
reader, and there is one rule for that, :meth:`View.follow`: every name that a segment can have is tried.
One that has none is a :class:`SegmentGone`.

The end of a complete raw segment, which the first batch of the next segment records.

Another program may have truncated the file since. If it lost only pieces of records that end later, no sequence is
missing, and nothing else shows the loss.
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
from wald.format.log_state import PreviousEnd, decode_previous
from wald.format.names import Kind, parse_segment_name
from wald.format.segment import BadHeader
from wald.segments.continuity import Continuity
from wald.segments.durable_end import EVERYTHING, Bound, lost_head, read_head, readable_head
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import FIRST_BATCH, RawFile, ScannedBatch
from wald.segments.reader import OpenSegment, open_segment

T = TypeVar("T")


class State(Enum):
    """What has become of a record, or of the segment that holds it."""

    ACTIVE = "active"
    """In the segment that is being written."""
    CUT = "cut"
    """In a complete segment that waits to be sealed."""
    SEALED = "sealed"
    RELEASED = "released"
    """Reclaimed; its file is still there, for the grace period."""
    QUARANTINED = "quarantined"
    """Its bytes are damaged, or were put aside because they were."""
    RECLAIMED = "reclaimed"
    ARCHIVED = "archived"
    """Not in the log any more, but in a bundle."""
    SKIPPED = "skipped"
    """A start passed over its number."""
    LOST = "lost"
    """Its bytes were damaged or missing, and ``wald repair`` has given it up."""
    NOT_RESTORED = "not-restored"
    """The log was made of an archive, which has it in no bundle."""
    NEVER_ISSUED = "never-issued"
    UNKNOWN = "unknown"
    """It was issued; no segment and no ledger says more."""


class SegmentGone(Damaged):
    """A listed segment has no file any more: it was reclaimed, or moved away."""


@dataclass(frozen=True, slots=True)
class View:
    """
    Attributes:
        bound: where the readable bytes end.
        listing: the segments, which reach at least that far.
        with_released: whether reclaimed segments whose files are still there are among those to read.
        head: the head that gave the bound.
        continuity: detects another log, or an older copy, at the path; None for no detection.
    """

    root: Root
    log_id: bytes
    bound: Bound
    listing: Listing
    with_released: bool = False
    head: Head | None = field(default=None, compare=False)
    continuity: Continuity | None = field(default=None, compare=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those to read, oldest first."""
        return self.listing.segments

    def limit(self, segment: Segment) -> int | None:
        """Where the readable bytes of a segment end; None: at its own end."""
        return self.bound.limit(segment.base_sequence)

    def state(self, segment: Segment) -> State:
        """How far a segment has come."""
        if segment.kind.reclaimed:
            return State.RELEASED
        if segment.kind is Kind.SEALED:
            return State.SEALED
        active = min(self.bound.segment, self.listing.newest_base())
        return State.ACTIVE if segment.base_sequence >= active else State.CUT

    def open(self, segment: Segment) -> OpenSegment:
        """
        Raises:
            SegmentGone: there is no such segment any more.
            Misplaced: the file is not the one that its name says.
            Damaged: nothing in it can be read.
        """
        return self.follow(segment, lambda found: open_segment(found, self.log_id))

    def follow(self, segment: Segment, action: Callable[[Segment], T]) -> T:
        """The result of ``action`` for a segment, in the form and under the name that it has now.

        A segment gets another name when it is sealed or reclaimed, and its old name back if it is needed again.

        Args:
            action: raises FileNotFoundError if there is no file of the name.

        Raises:
            SegmentGone: there is none of any name.
        """
        with suppress(FileNotFoundError):
            return action(segment)
        for kind in 2 * SEGMENT_KINDS:  # twice, because the name may be changed back in between
            with suppress(FileNotFoundError):
                return action(segment.named(kind))
        raise SegmentGone(
            f"{segment.path}: there is no such segment any more", case="segment-gone", directory=segment.path.parent
        )

    def including_released(self) -> View:
        """The same, with reclaimed segments whose files are still there among those to read."""
        return replace(self, listing=self.listing.with_released(), with_released=True)

    def renewed(self) -> View:
        """Return a current view of the log; the directory is listed again only if it has changed.

        Raises:
            Replaced: the path has another log, an older copy, or no log.
        """
        found = _view(self.root, self.log_id, self.continuity, before=self)
        return found.including_released() if self.with_released else found

    def written_ns(self, sequence: int, now_ns: int) -> int | None:
        """Estimate, from file time stamps, when a record with an append time in the future was written.

        A raw segment records when it was made, and a sealed one was made when it was complete. Stamps in the future
        come from the same wrong clock, so the next segment is used instead; None after the last one.
        """
        for segment in self.segments[self.listing.covering(sequence) :]:
            with suppress(OSError, Damaged):
                stamped_ns = _stamped_ns(segment)
                if stamped_ns <= now_ns:
                    return stamped_ns
        return None

    def require_continuity(self) -> None:
        """
        Raises:
            Replaced: as of :meth:`renewed`.
        """
        if self.continuity is not None:
            self.continuity.require()

    def without(self, gone: SegmentGone, segment: Segment) -> View:
        """The same with the segments that there are now, after one turned out to be gone.

        Raises:
            Damaged: the directory still lists it.
        """
        listing = self.list_again()
        if any(found.base_sequence == segment.base_sequence for found in (*listing.segments, *listing.released)):
            raise Damaged(
                f"{segment.path}: its directory lists it, but the file does not exist",
                case="segment-file-missing",
                directory=segment.path.parent,
            ) from gone
        return replace(self, listing=listing)

    def completed(self, first: int, last: int) -> View:
        """Return the view with the segments of bases ``first`` to ``last`` whose deletion was undone since."""
        known = {segment.base_sequence for segment in self.listing.between(first, last)}
        found = [each for each in self.list_again().between(first, last) if each.base_sequence not in known]
        return replace(self, listing=self.listing.including(found)) if found else self

    def list_again(self) -> Listing:
        """The segments that there are now, the released ones among those to read as in this view."""
        listing = list_segments(self.root)
        return listing.with_released() if self.with_released else listing


def read_view(root: Root, log_id: bytes, *, bound: Bound | None = None, continuity: Continuity | None = None) -> View:
    """The log in ``root`` as it is now.

    Without a readable head, which is derived and may be lost, everything but the newest raw segment may be read.

    Args:
        bound: how far it may be read, where that is known from elsewhere.

    Raises:
        Damaged: the directory of the segments is not there.
        Replaced: as of :meth:`View.renewed`, by ``continuity``.
    """
    if bound is None:
        return _view(root, log_id, continuity)
    if continuity is not None:
        continuity.require()
    return View(root, log_id, bound, list_segments(root), continuity=continuity)


def _view(root: Root, log_id: bytes, continuity: Continuity | None, *, before: View | None = None) -> View:
    head = readable_head(root)
    if continuity is not None:
        continuity.check(head)
    listing = None if before is None else before.listing
    # A network file system may give times from its cache, so the segment of the head must be listed as well.
    if (
        before is not None
        and listing is not None
        and listing.changed_ns is not None
        and listing.changed_ns == last_changes(root)
        and (head is None or head.segment <= listing.newest_base())
    ):
        if before.with_released:
            listing = replace(listing, segments=tuple(s for s in listing.segments if not s.kind.reclaimed))
    else:
        listing = list_segments(root)  # after the head: a segment that the head is in has its name already
    return View(root, log_id, _bound(head, listing), listing, head=head, continuity=continuity)


def _bound(head: Head | None, listing: Listing) -> Bound:
    if head is not None:
        return Bound(head.segment, head.position, head.sequence)
    newest = listing.segments[-1] if listing.segments else None
    if newest is not None and newest.kind is Kind.RAW:
        return Bound(newest.base_sequence, 0, newest.base_sequence - 1, lost=_holds_a_batch(newest))
    return EVERYTHING


def no_segment(root: Root, last: int, *, starting: bool = False) -> Damaged:
    """Return the error for a log without any segment, although its newest one is never deleted.

    Args:
        last: the last record that was acknowledged.
        starting: whether the daemon is starting.
    """
    return Damaged(
        f"{root.segments}: no segment, but records up to {last} were acknowledged",
        case="no-segment-at-start" if starting else "no-segment",
        root=root.path,
        path=root.segments,
    )


def _stamped_ns(segment: Segment) -> int:
    with open_file(segment.path) as file:
        if segment.kind.form is Kind.RAW:
            with suppress(BadHeader):
                return RawFile(file.fileno()).header().created_at_ns
        return os.fstat(file.fileno()).st_mtime_ns


def _holds_a_batch(segment: Segment) -> bool:
    """Whether a raw segment has more in it than control batches; one that is gone counts as empty."""
    try:
        with open_file(segment.path) as file:
            index = partial(find_index, segment.path.parent, None, segment.base_sequence)
            scan = RawFile(file.fileno(), index=index).scan()
            return any(isinstance(found, ScannedBatch) and not found.header.is_control for found in scan)
    except (FileNotFoundError, Damaged):
        return False


def head_of(root: Root) -> Head | None:
    """The durable head; None before anything was durable.

    Raises:
        Damaged: the file is there and is not a head, or it is lost: there are records and nothing says how far.
    """
    found = read_head(root)
    if found is not None:
        return found
    listing = list_segments(root)
    bound = _bound(None, listing)
    if not listing.segments or not (bound.lost or bound.sequence != 0):
        return None
    found = read_head(root)  # a daemon may have made it since
    if found is None:
        raise lost_head(root, bound)
    return found


def recorded_end(view: View, segment: Segment) -> int:
    """Return the position at which a raw segment ended when it was cut; 0 if that is not known."""
    following = view.listing.behind(segment.base_sequence)
    ending = None if following is None else _previous(view, following)
    if ending is not None:
        with suppress(Damaged, OSError), open_file(segment.path) as file:
            index = partial(find_index, segment.path.parent, view.log_id, segment.base_sequence)
            # A repair gives a segment that it changes another salt.
            if RawFile(file.fileno(), index=index).salt == ending.salt:
                return ending.position
    return 0


def _previous(view: View, following: Segment) -> PreviousEnd | None:
    with suppress(Damaged, OSError), closing(view.open(following)) as opened:
        first = next(iter(opened.batches(FIRST_BATCH, None)), None)
        if isinstance(first, StoredBatch) and first.header.is_state:
            return decode_previous(first.payload)
    return None


def view_behind(root: Root, log_id: bytes, base: int) -> View:
    """Return a view of the segment after ``base`` only, which takes less time than one of all segments."""
    names = (parse_segment_name(entry.name) for entry in os.scandir(root.segments) if entry.name[:20] > f"{base:020d}")
    bases = (name.base_sequence for name in names if name is not None and name.kind in (Kind.RAW, Kind.SEALED))
    found = min(bases, default=None)
    segments = () if found is None else (Segment(found, Kind.RAW, root.segment(found, Kind.RAW)),)
    return View(root, log_id, EVERYTHING, Listing(segments))


def truncated(path: Path, position: int, end: int) -> Damaged:
    """Return the error for a segment whose batches end at ``position`` and ended at ``end`` when it was cut."""
    return Damaged(
        f"{path}: offset {position}: another program truncated the segment, which ended at {end} when it was cut",
        case="segment-truncated",
        root=path.parent.parent,
    )
