"""Immutable listing of a log's segments.

Reading the directory during a rename may show both names or neither, so :func:`list_segments` reads until two readings
agree.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.layout import TEMPORARY, Root
from wald.format.names import Kind, parse_segment_name, segment_name

SEGMENT_KINDS = (Kind.RAW, Kind.SEALED, Kind.RELEASED, Kind.DELETING, Kind.RAW_RELEASED, Kind.RAW_DELETING)
_SECOND_NS = 1_000_000_000
_SETTLED_NS = 100_000_000  # the clock for time stamps in file systems ticks every few milliseconds, …
_SETTLED_SECONDS_NS = 2_100_000_000  # … every second (ext4 with inodes of 128 bytes) or every other second (FAT)


class Segment(NamedTuple):
    """A segment of a log."""

    base_sequence: int
    kind: Kind
    path: Path

    def with_kind(self, kind: Kind) -> Segment:
        return Segment(self.base_sequence, kind, self.path.with_name(segment_name(self.base_sequence, kind)))


_base = attrgetter("base_sequence")


@dataclass(frozen=True, slots=True)
class Listing:
    """Segments of a log, oldest first."""

    segments: tuple[Segment, ...]  # readable; without raw forms of sealed segments
    released: tuple[Segment, ...] = ()  # reclaimed, but the files still exist
    # Last change of each directory; None if another change could get the same time stamp.
    changed_ns: tuple[int, ...] | None = field(default=None, compare=False)

    def with_released(self) -> Listing:
        return replace(self, segments=tuple(sorted(self.by_base().values(), key=_base)))

    def including(self, segments: Iterable[Segment]) -> Listing:
        return replace(self, segments=tuple(sorted((*self.segments, *segments), key=_base)), changed_ns=None)

    def by_base(self) -> dict[int, Segment]:
        """Return all segments by base; readable segments take precedence."""
        return {segment.base_sequence: segment for segment in (*self.released, *self.segments)}

    def newest_base(self) -> int:
        return max((each[-1].base_sequence for each in (self.released, self.segments) if each), default=0)

    def successors(self) -> dict[int, int]:
        return dict(pairwise(sorted(self.by_base())))

    def index_covering(self, sequence: int) -> int:
        """Return the index of the segment that covers ``sequence``; 0 if all are newer."""
        return max(0, bisect_right(self.segments, sequence, key=_base) - 1)

    def previous(self, segment: Segment) -> Segment | None:
        index = bisect_left(self.segments, segment.base_sequence, key=_base)
        return self.segments[index - 1] if index else None

    def between(self, first: int, last: int) -> tuple[Segment, ...]:
        start = bisect_left(self.segments, first, key=_base)
        return self.segments[start : bisect_right(self.segments, last, key=_base)]

    def next_after(self, sequence: int) -> Segment | None:
        index = bisect_right(self.segments, sequence, key=_base)
        return self.segments[index] if index < len(self.segments) else None


def list_segments(root: Root) -> Listing:
    changed_ns = last_changes(root)
    listing = _scan(root)
    if changed_ns is not None and last_changes(root) == changed_ns:
        return replace(listing, changed_ns=changed_ns)
    while not _agrees(next_listing := _scan(root), listing):
        listing = next_listing
    return next_listing


def last_changes(root: Root) -> tuple[int, ...] | None:
    """Return the current :attr:`Listing.changed_ns`."""
    try:
        times_ns = tuple(os.stat(directory).st_mtime_ns for directory in root.segment_directories)
    except OSError:
        return None
    now_ns = time.time_ns()
    settled = (now_ns - at_ns > (_SETTLED_NS if at_ns % _SECOND_NS else _SETTLED_SECONDS_NS) for at_ns in times_ns)
    return times_ns if all(settled) else None


def find_being_sealed(root: Root, bases: Collection[int]) -> set[int]:
    """Return those of ``bases`` that the sealer is sealing or has sealed.

    The sealer creates its temporary file before it opens the raw file. So after a raw segment was renamed, this
    function finds the temporary file, or the sealer finds no segment.
    """
    names = (entry.name.partition(Kind.SEALED.value) for entry in os.scandir(root.segments))
    sealing = {int(base) for base, suffix, rest in names if suffix and base.isdecimal() and rest.endswith(TEMPORARY)}
    # After the temporary files, which become sealed segments.
    return {base for base in bases if base in sealing or root.segment(base, Kind.SEALED).exists()}


def _scan(root: Root) -> Listing:
    readable: dict[int, Segment] = {}
    released: dict[int, Segment] = {}
    for directory in root.segment_directories:
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{directory}: the segments directory is gone",
                case="segments-directory-gone",
                root=root.path,
            ) from None
        for entry in entries:
            name = parse_segment_name(entry.name)
            if name is None or name.kind is Kind.INDEX:
                continue
            segments = released if name.kind.is_reclaimed else readable
            if name.base_sequence not in segments or name.kind is Kind.SEALED:
                segments[name.base_sequence] = Segment(name.base_sequence, name.kind, Path(entry.path))
    return Listing(tuple(sorted(readable.values(), key=_base)), tuple(sorted(released.values(), key=_base)))


def _agrees(listing: Listing, previous: Listing) -> bool:
    """Return True if two readings agree, apart from new and deleted segments."""
    bases_now, bases_before = listing.by_base(), previous.by_base()
    newest = previous.newest_base()
    return (
        all(base in bases_before or base > newest for base in bases_now)
        and _in_both_states(listing) <= _in_both_states(previous)
        # Twice, because a segment may be renamed back in between.
        and not any(
            os.path.lexists(segment.with_kind(kind).path)
            for base, segment in bases_before.items()
            if base not in bases_now
            for kind in 2 * SEGMENT_KINDS
        )
    )


def _in_both_states(listing: Listing) -> set[int]:
    """Return bases both readable and released: renamed during the reading, or sealed after the release."""
    return {s.base_sequence for s in listing.released} & {s.base_sequence for s in listing.segments}
