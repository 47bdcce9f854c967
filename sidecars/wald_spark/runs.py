"""What a log holds between two sequences, batch by batch, without reading the records: what admission counts.

A sealed segment tells by the table of batches in its index, a raw one by its headers, from its sparse index on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wald.errors import Damaged
from wald.format.sealed import BadSealed, SealedIndex
from wald.store.files.directory import Listing, Segment, look_again
from wald.store.segments.head import Bound
from wald.store.segments.opened import OpenSegment, SealedSegment, Whole, open_segment
from wald_spark.admission import Run
from wald_spark.places import LogPlace

_LAST = 1 << 63


@dataclass(frozen=True, slots=True)
class _Table:
    """The batches of the wanted routes in one sealed segment, as columns."""

    base_sequence: int
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, index: SealedIndex, routes: frozenset[str] | None) -> _Table:
        table = index.batch_table()
        wanted = [number for number, entry in enumerate(index.routes) if routes is None or entry.route in routes]
        kept = np.isin(np.asarray(table.routes), wanted)
        places = np.append(np.asarray(table.positions, np.int64), index.raw_bytes)
        columns = (np.asarray(table.bases), np.asarray(table.counts), np.diff(places))
        return cls(index.base_sequence, *(column.astype(np.int64)[kept] for column in columns))

    def runs(self, start: int) -> Iterator[Run]:
        """Those behind ``start``, and maybe the one that it is in."""
        lasts = self.firsts + self.counts - 1
        for row in range(int(np.searchsorted(lasts, start, side="right")), len(lasts)):
            yield Run(int(self.firsts[row]), int(self.counts[row]), int(self.raw_bytes[row]))


class Runs:
    """The records of ``routes`` (None: all) in one log; remembers the sealed segment it was last asked about."""

    def __init__(self, place: LogPlace, routes: frozenset[str] | None) -> None:
        self._place = place
        self._routes = routes
        self._table: _Table | None = None

    def between(self, bound: Bound, listing: Listing, start: int, end: int) -> Iterator[Run]:
        """Runs of records start < s ≤ end, in order; the records of a segment that cannot be read are one run.

        Args:
            bound, listing: as :meth:`LogPlace.look` gave them.
        """
        while True:
            try:
                for segment in listing.segments[listing.covering(start + 1) :]:
                    if segment.base_sequence > min(end, bound.segment):
                        return
                    for run in self._in_segment(segment, listing, bound, start):
                        if run.first > end:
                            return
                        if run.last > start:
                            yield run.between(start + 1, end) if run.count else run
                            start = run.last
                return
            except FileNotFoundError as gone:
                listing = look_again(self._place.root, listing, gone)

    def _in_segment(self, segment: Segment, listing: Listing, bound: Bound, start: int) -> Iterator[Run]:
        """The runs of one segment from the one on that ``start`` is in."""
        if self._table is None or self._table.base_sequence != segment.base_sequence:
            try:
                with closing(open_segment(segment, self._place.log_id)) as opened:
                    if not isinstance(opened, SealedSegment):
                        yield from self._raw(opened, bound.limit(segment.base_sequence), start)
                        return
                    self._table = _Table.of(opened.index, self._routes)
            except (Damaged, BadSealed):  # whoever reads it meets this
                behind = (other.base_sequence for other in listing.segments)
                following = min((base for base in behind if base > segment.base_sequence), default=_LAST)
                yield Run(segment.base_sequence, following - segment.base_sequence, 0)
                return
        yield from self._table.runs(start)

    def _raw(self, segment: OpenSegment, limit: int | None, start: int) -> Iterator[Run]:
        for met in segment.batches(segment.position_of_sequence(start + 1, limit), limit):
            wanted = isinstance(met, Whole) and (self._routes is None or met.route in self._routes)
            if isinstance(met, Whole) and wanted and not met.header.is_control:
                yield Run(met.header.base_sequence, met.header.count, met.header.total_bytes)
