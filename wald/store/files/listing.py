"""An immutable listing of the segments of a log, by state.

A file's name is its state, so listing the directory shows what there is to do and to read.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from wald.errors import Damaged
from wald.format.names import Kind, parse_segment_name
from wald.store.files.directory import TEMPORARY, Root


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment in the form in which it is to be read."""

    base_sequence: int
    kind: Kind
    path: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """The segments in a directory, oldest first.

    Attributes:
        segments: the readable ones. A raw file beside its sealed twin is already replaced and not listed.
        released: those that are reclaimed, as long as their files are there.
    """

    segments: tuple[Segment, ...]
    released: tuple[Segment, ...] = ()

    def with_released(self) -> Listing:
        """The same, with the released segments among the readable ones."""
        found = {segment.base_sequence: segment for segment in (*self.released, *self.segments)}
        return Listing(tuple(found[base] for base in sorted(found)), self.released)

    def newest_base(self) -> int:
        """The base of the newest segment; 0 if there is none."""
        return max((found[-1].base_sequence for found in (self.released, self.segments) if found), default=0)

    def successors(self) -> dict[int, int]:
        """Of each segment, by base, the base of the one behind it; the newest is not in it."""
        return dict(pairwise(sorted({segment.base_sequence for segment in (*self.released, *self.segments)})))

    def covering(self, sequence: int) -> int:
        """The position in ``segments`` of the one that ``sequence`` falls into; 0 if it is older than all."""
        return max(0, bisect_right(self.segments, sequence, key=_base) - 1)

    def including(self, segments: Iterable[Segment]) -> Listing:
        """The same, with ``segments`` among the readable ones."""
        return replace(self, segments=tuple(sorted((*self.segments, *segments), key=_base)))

    def before(self, segment: Segment) -> Segment | None:
        """The readable one in front of ``segment``."""
        number = bisect_left(self.segments, segment.base_sequence, key=_base)
        return self.segments[number - 1] if number else None

    def between(self, first: int, last: int) -> tuple[Segment, ...]:
        """The readable ones with a base from ``first`` to ``last``."""
        begin = bisect_left(self.segments, first, key=_base)
        return self.segments[begin : bisect_right(self.segments, last, key=_base)]

    def behind(self, sequence: int) -> Segment | None:
        """The first readable one that begins behind ``sequence``."""
        number = bisect_right(self.segments, sequence, key=_base)
        return self.segments[number] if number < len(self.segments) else None


def _base(segment: Segment) -> int:
    return segment.base_sequence


def list_segments(root: Root) -> Listing:
    """List the segments in the directory.

    Raises:
        Damaged: it is not there.
    """
    best: dict[int, Segment] = {}
    released: dict[int, Segment] = {}
    for directory in root.segment_directories:
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{directory}: the directory of the segments is gone",
                hint=f"ls -l {root.path}; restore it from a backup",
            ) from None
        for entry in entries:
            name = parse_segment_name(entry.name)
            if name is None or name.kind is Kind.INDEX:
                continue
            found = released if name.kind.reclaimed else best
            if name.base_sequence not in found or name.kind is Kind.SEALED:
                found[name.base_sequence] = Segment(name.base_sequence, name.kind, Path(entry.path))
    return Listing(tuple(best[base] for base in sorted(best)), tuple(released[base] for base in sorted(released)))


def being_sealed(root: Root) -> set[int]:
    """The segments that the sealer is at work on, or that are sealed.

    The sealer makes its temporary file before it opens the raw one by name. So if a program renames a raw segment first
    and calls this then, either it sees that the segment is being sealed, or the sealer finds that the segment is gone.
    """
    suffix = Kind.SEALED.value
    names = (entry.name.partition(suffix) for entry in os.scandir(root.segments))
    return {
        int(base)
        for base, found, rest in names
        if found and base.isdecimal() and (not rest or rest.endswith(TEMPORARY))
    }
