"""The tables of a sealed segment's index, as columns: a row is made only where one is asked for.

A segment may have a thousand routes, and a backlog ten thousand segments. What looks at all of them does so column by
column, without a step of Python for each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import NamedTuple, Self, overload


class RouteEntry(NamedTuple):
    """The records of one route in a segment, or in a part of it.

    Attributes:
        count: records that begin there; 0 if only pieces do, or if the number is unknown.
        last: of the records of which it holds any piece.
        payload_bytes: 0 if unknown.
    """

    route: str
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    first: int
    last: int
    payload_bytes: int = 0

    def plus(self, other: RouteEntry) -> RouteEntry:
        """Return the entry for the records of both parts, which have none in common."""
        return RouteEntry(
            self.route,
            self.count + other.count,
            min(self.first, other.first),
            max(self.last, other.last),
            self.payload_bytes + other.payload_bytes,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable(Sequence[RouteEntry]):
    """The routes of a segment, by number; equal to any sequence of the same entries.

    Attributes:
        names, counts, firsts, lasts, payload_bytes: of equal length. Consecutive segments with the same routes have the
            same ``names``, so what was made of them can be used again.
    """

    names: tuple[str, ...]
    counts: Sequence[int]
    firsts: Sequence[int]
    lasts: Sequence[int]
    payload_bytes: Sequence[int]

    @classmethod
    def of(cls, entries: Sequence[RouteEntry]) -> Self:
        """The table of ``entries``, which may be one already."""
        if isinstance(entries, cls):
            return entries
        return cls(*zip(*entries, strict=True)) if entries else cls((), (), (), (), ())

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[RouteEntry]:
        return map(RouteEntry, self.names, self.counts, self.firsts, self.lasts, self.payload_bytes)

    @overload
    def __getitem__(self, number: int) -> RouteEntry: ...
    @overload
    def __getitem__(self, number: slice) -> list[RouteEntry]: ...
    def __getitem__(self, number: int | slice) -> RouteEntry | list[RouteEntry]:
        if isinstance(number, slice):
            return list(self)[number]
        columns = (self.names, self.counts, self.firsts, self.lasts, self.payload_bytes)
        return RouteEntry._make(column[number] for column in columns)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def reaching(self, last: int) -> Self:
        """The same, with each route's last record no earlier than ``last``."""
        lasts = tuple(map(max, self.lasts, repeat(last)))
        return type(self)(self.names, self.counts, self.firsts, lasts, self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame of whole batches.

    Attributes:
        offset: in the compressed file; ``raw_offset``: in the raw segment.
        first_sequence, next_sequence: records that begin in it are first ≤ s < next.
        earliest_ns, latest_ns: append times; earliest > latest if it holds no batch.
        routes: ids, as indexes into the table of routes.
    """

    offset: int
    compressed_bytes: int
    raw_offset: int
    raw_bytes: int
    first_sequence: int
    next_sequence: int
    earliest_ns: int
    latest_ns: int
    routes: tuple[int, ...]


@dataclass(slots=True)
class BatchTable:
    """Every batch of a segment as columns; control batches are not listed."""

    positions: array[int] = field(default_factory=lambda: array("Q"))
    bases: array[int] = field(default_factory=lambda: array("Q"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    routes: array[int] = field(default_factory=lambda: array("I"))
    times_ns: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, eq=False)
class FrameTable(Sequence[Frame]):
    """The frames of a segment, in order, with the fields of :class:`Frame` as columns; equal to any sequence of them.

    Attributes:
        ends: where the routes of each frame end in ``routes``.
    """

    offsets: Sequence[int]
    compressed_bytes: Sequence[int]
    raw_offsets: Sequence[int]
    raw_bytes: Sequence[int]
    first_sequences: Sequence[int]
    next_sequences: Sequence[int]
    earliest_ns: Sequence[int]
    latest_ns: Sequence[int]
    ends: Sequence[int]
    routes: Sequence[int]

    @classmethod
    def of(cls, frames: Sequence[Frame]) -> Self:
        """The table of ``frames``, which may be one already."""
        if isinstance(frames, cls):
            return frames
        routes = [frame.routes for frame in frames]
        return cls(
            [frame.offset for frame in frames],
            [frame.compressed_bytes for frame in frames],
            [frame.raw_offset for frame in frames],
            [frame.raw_bytes for frame in frames],
            [frame.first_sequence for frame in frames],
            [frame.next_sequence for frame in frames],
            [frame.earliest_ns for frame in frames],
            [frame.latest_ns for frame in frames],
            list(accumulate(map(len, routes))),
            list(chain.from_iterable(routes)),
        )

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> Frame: ...
    @overload
    def __getitem__(self, number: slice) -> list[Frame]: ...
    def __getitem__(self, number: int | slice) -> Frame | list[Frame]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        begin = self.ends[number - 1] if number else 0
        return Frame(
            self.offsets[number],
            self.compressed_bytes[number],
            self.raw_offsets[number],
            self.raw_bytes[number],
            self.first_sequences[number],
            self.next_sequences[number],
            self.earliest_ns[number],
            self.latest_ns[number],
            tuple(self.routes[begin : self.ends[number]]),
        )

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
