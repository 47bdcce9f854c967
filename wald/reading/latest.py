"""Backward search for the start of the last N records of a route.

The index of a sealed segment lists the batches of each route. In a raw segment, or if records must match, the search
reads a window at the end, and enlarges it eightfold until it has enough records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.records import Record
from wald.format.sealed_index import BadSealed, SealedIndex
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.segments.reader import OpenSegment, Routes, SealedSegment
from wald.segments.seek import end_of
from wald.segments.view import View

Run = tuple[int, int]  # first sequence and number of consecutive records
FindRecords = Callable[[Batch], Iterable[Record]]  # returns the matching records of a batch

_WINDOW_RECORDS = 1024  # initially
_GROWTH_FACTOR = 8


def start_of_latest(
    view: View, route: str | None, count: int, *, last: int, first: int = 1, find_records: FindRecords | None = None
) -> int:
    """Return the first of the last ``count`` records up to ``last``; if there are fewer, the oldest or ``first``.

    Segments that end before ``first`` are not read. Damage is ignored, because reading reports it.
    """
    routes = None if route is None else frozenset([route])
    top = min(last, end_of(view) - 1)
    if count == 0:
        return top + 1
    for segment in reversed(view.segments):
        if segment.base_sequence > top:
            continue
        if top < first:
            break
        with suppress(Damaged, BadSealed):
            for base, run_records in _runs(view, segment, routes, top, count, find_records):
                records = max(0, min(run_records, top + 1 - base))
                if records >= count:
                    return base + records - count
                count -= records
        top = segment.base_sequence - 1
    return max(first, view.segments[0].base_sequence if view.segments else 1)


def _runs(
    view: View, segment: Segment, routes: Routes, top: int, count: int, find_records: FindRecords | None
) -> Iterator[Run]:
    """Yield runs up to ``top``, newest first. A raw segment yields at least ``count`` records if it has them."""
    base, limit = segment.base_sequence, view.limit(segment)
    if find_records is not None:
        yield from _widen_window(lambda first: _matching_runs(view, routes, first, top, find_records), base, top, count)
        return
    with closing(view.open(segment)) as opened:
        if isinstance(opened, SealedSegment):
            yield from _indexed_runs(opened.index, routes)
        else:
            yield from _widen_window(lambda first: _stored_runs(opened, limit, routes, first, top), base, top, count)


def _widen_window(runs_from: Callable[[int], list[Run]], base: int, top: int, count: int) -> Iterable[Run]:
    """Return the runs of the first window with ``count`` records, or of the whole segment."""
    window = max(_WINDOW_RECORDS, count)
    while True:
        first = max(base, top + 1 - window)
        runs = runs_from(first)
        if first == base or sum(records for _, records in runs) >= count:
            return reversed(runs)
        window *= _GROWTH_FACTOR


def _indexed_runs(index: SealedIndex, routes: Routes) -> Iterator[Run]:
    route_ids = {i for i, entry in enumerate(index.routes) if routes is None or entry.route in routes}
    if not route_ids:
        return
    table = index.batch_table()
    for frame in reversed(index.frames):
        if route_ids.isdisjoint(frame.routes) or index.was_damaged(frame):
            continue
        begin = bisect_left(table.positions, frame.raw_offset)
        end = bisect_left(table.positions, frame.raw_offset + frame.raw_bytes)
        for i in reversed(range(begin, end)):
            if table.counts[i] and table.routes[i] in route_ids:
                yield table.bases[i], table.counts[i]


def _stored_runs(opened: OpenSegment, limit: int | None, routes: Routes, first: int, top: int) -> list[Run]:
    return [
        (item.header.base_sequence, min(item.header.count, top + 1 - item.header.base_sequence))
        for item in opened.batches(opened.position_of_sequence(first, limit), limit, routes)
        if isinstance(item, StoredBatch)
        and item.header.count
        and item.header.base_sequence <= top
        and (routes is None or item.route in routes)
    ]


def _matching_runs(view: View, routes: Routes, first: int, top: int, find_records: FindRecords) -> list[Run]:
    selection = Selection(routes, first, last=top)
    batches = read_selection(view, selection, on_missing="skip", on_damage=lambda _: None)
    return [(record.sequence, 1) for batch in batches for record in find_records(batch)]
