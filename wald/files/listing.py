"""Immutable listing of a log's segments.

During a rename, one reading of the directory may show both names or none, so :func:`list_segments` reads until two
readings agree.
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
_SETTLED_NS = 100_000_000  # file systems stamp changes with a clock that ticks every few milliseconds, …
_SETTLED_SECONDS_NS = 2_100_000_000  # … or in whole seconds (ext4 with inodes of 128 bytes), or in even ones (FAT)


class Segment(NamedTuple):
    """Segment of a log."""

    base_sequence: int
    kind: Kind
    path: Path

    def named(self, kind: Kind) -> Segment:
        return Segment(self.base_sequence, kind, self.path.with_name(segment_name(self.base_sequence, kind)))


_base = attrgetter("base_sequence")


@dataclass(frozen=True, slots=True)
class Listing:
    """Segments of a log, oldest first."""

    segments: tuple[Segment, ...]  # readable; without raw forms of sealed segments
    released: tuple[Segment, ...] = ()  # reclaimed, but the files still exist
    # When each directory last changed; None if another change could get the same time stamp.
    changed_ns: tuple[int, ...] | None = field(default=None, compare=False)

    def with_released(self) -> Listing:
        return replace(self, segments=tuple(sorted(self.by_base().values(), key=_base)))

    def including(self, segments: Iterable[Segment]) -> Listing:
        return replace(self, segments=tuple(sorted((*self.segments, *segments), key=_base)), changed_ns=None)

    def by_base(self) -> dict[int, Segment]:
        """Return all segments by base; readable segments take precedence."""
        return {segment.base_sequence: segment for segment in (*self.released, *self.segments)}

    def newest_base(self) -> int:
        return max((found[-1].base_sequence for found in (self.released, self.segments) if found), default=0)

    def successors(self) -> dict[int, int]:
        return dict(pairwise(sorted(self.by_base())))

    def covering(self, sequence: int) -> int:
        """Return the index of the segment that covers ``sequence``; 0 if all are newer."""
        return max(0, bisect_right(self.segments, sequence, key=_base) - 1)

    def before(self, segment: Segment) -> Segment | None:
        number = bisect_left(self.segments, segment.base_sequence, key=_base)
        return self.segments[number - 1] if number else None

    def between(self, first: int, last: int) -> tuple[Segment, ...]:
        begin = bisect_left(self.segments, first, key=_base)
        return self.segments[begin : bisect_right(self.segments, last, key=_base)]

    def behind(self, sequence: int) -> Segment | None:
        number = bisect_right(self.segments, sequence, key=_base)
        return self.segments[number] if number < len(self.segments) else None


def list_segments(root: Root) -> Listing:
    changed_ns = last_changes(root)
    found = _scan(root)
    if changed_ns is not None and last_changes(root) == changed_ns:
        return replace(found, changed_ns=changed_ns)
    while not _confirms(again := _scan(root), found):
        found = again
    return again


def last_changes(root: Root) -> tuple[int, ...] | None:
    """Return the current :attr:`Listing.changed_ns`."""
    try:
        times_ns = tuple(os.stat(directory).st_mtime_ns for directory in root.segment_directories)
    except OSError:
        return None
    now_ns = time.time_ns()
    settled = all(now_ns - at_ns > (_SETTLED_NS if at_ns % _SECOND_NS else _SETTLED_SECONDS_NS) for at_ns in times_ns)
    return times_ns if settled else None


def being_sealed(root: Root, bases: Collection[int]) -> set[int]:
    """Return those of ``bases`` that the sealer is sealing or has sealed.

    The sealer creates its temporary file before it opens the raw file. After a raw segment was renamed, either this
    function finds the temporary file or the sealer does not find the segment.
    """
    names = (entry.name.partition(Kind.SEALED.value) for entry in os.scandir(root.segments))
    sealing = {int(base) for base, found, rest in names if found and base.isdecimal() and rest.endswith(TEMPORARY)}
    # After the temporary files, which become sealed segments.
    return {base for base in bases if base in sealing or root.segment(base, Kind.SEALED).exists()}


def _scan(root: Root) -> Listing:
    best: dict[int, Segment] = {}
    released: dict[int, Segment] = {}
    for directory in root.segment_directories:
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{directory}: the directory of the segments is gone",
                case="segments-directory-gone",
                root=root.path,
            ) from None
        for entry in entries:
            name = parse_segment_name(entry.name)
            if name is None or name.kind is Kind.INDEX:
                continue
            found = released if name.kind.reclaimed else best
            if name.base_sequence not in found or name.kind is Kind.SEALED:
                found[name.base_sequence] = Segment(name.base_sequence, name.kind, Path(entry.path))
    return Listing(tuple(sorted(best.values(), key=_base)), tuple(sorted(released.values(), key=_base)))


def _confirms(listing: Listing, before: Listing) -> bool:
    """Return True if two readings agree, except for new and deleted segments, which may differ each time."""
    now, then = listing.by_base(), before.by_base()
    newest = before.newest_base()
    return (
        all(base in then or base > newest for base in now)
        and _in_both_states(listing) <= _in_both_states(before)
        # Each name twice: a segment may be renamed back in between.
        and not any(
            os.path.lexists(segment.named(kind).path)
            for base, segment in then.items()
            if base not in now
            for kind in 2 * SEGMENT_KINDS
        )
    )


def _in_both_states(listing: Listing) -> set[int]:
    """Return bases both readable and released: renamed during the reading, or sealed after the release."""
    return {s.base_sequence for s in listing.released} & {s.base_sequence for s in listing.segments}
