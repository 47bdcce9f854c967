"""How many records were lost, and whose they were, as far as the ledger or what is left of an index says.

What relief had dropped before the damage is not lost. An index says which records that were; the ledger only counts
those of each route that were left, and its line about a relief is written before that. So it is believed only if
something proves that the relief was carried out; else the records count as lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from wald.errors import Damaged
from wald.format.sealed import BadSealed
from wald.format.spans import Span, Spans
from wald.format.tables import RouteEntry
from wald.store.files.listing import Segment
from wald.store.repairing.facts import SegmentFacts
from wald.store.retention.history import History
from wald.store.segments.compression import SealedFile

Batch = tuple[str, int, int, int]
"""A route; the first sequence of a batch of it, how many records begin in that, and the bytes of its payload."""


def records_lost(spans: Sequence[Span], found: SegmentFacts | None, history: History) -> int:
    """How many records of ``spans`` were there before the damage; no more than that.

    Args:
        found: about the segment that they were in, if it is there.
    """
    total = sum(last - first + 1 for first, last in spans)
    if found is not None and found.dropped is not None:
        dropped = Spans(found.dropped)
        return total - sum(dropped.count(*span) for span in spans)
    try:
        sealed = history.sealed(spans[0][0]) if spans else None
        relieved = found is not None and found.survey is not None and found.survey.relieved
        left = history.left(sealed["base"], relieved=relieved) if sealed is not None else None
    except Damaged:
        return total
    if sealed is None or left is None or spans[-1][1] > sealed["last"]:
        return total
    there = 0
    if found is not None:
        if found.survey is None or found.base != sealed["base"]:
            return total
        there = found.survey.kept - sum(first == last and first in found.survey.broken for first, last in spans)
    lost = sum(entry.count for entry in left) - there
    return min(total, lost) if lost >= 0 else total  # it holds more than the ledger says: that is not believed


def routes_lost(span: Span, segment: Segment | None, history: History) -> list[RouteEntry] | None:
    """What of each route the records of ``span`` were; None if it is not known of all.

    Args:
        segment: the one that they were in, if it is there.
    """
    found = _by_index(span, segment) if segment is not None else None
    return found if found is not None else _by_ledger(span, history)


def _by_index(span: Span, segment: Segment) -> list[RouteEntry] | None:
    """By the table of all batches, in an index that can be read."""
    first, last = span
    entries: dict[str, RouteEntry] = {}
    try:
        with SealedFile(segment.path) as sealed:
            table, routes, relieved = sealed.index.batch_table(), sealed.index.routes, sealed.index.relieved
    except (Damaged, BadSealed, OSError):
        return None
    begun = {number: entry.last for number, entry in enumerate(routes) if not entry.count}  # before the segment
    for base, count, number in zip(table.bases, table.counts, table.routes, strict=True):
        begin, end = max(first, base), min(last, base + count - 1)
        if begin <= end:
            _add(entries, RouteEntry(routes[number].route, end - begin + 1, begin, end, 0))
        elif not count and number in begun and first <= base <= last + 1:  # a piece of a record that began before
            _add(entries, RouteEntry(routes[number].route, 0, begun[number], begun[number], 0))
        if count:
            begun[number] = base + count - 1
    dropped = Spans(relieved.ranges if relieved is not None else ()).count(first, last)
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total + dropped == last - first + 1 else None


def _by_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """By the lines about the sealing of segments all of whose records are lost."""
    entries: dict[str, RouteEntry] = {}
    at = span[0]
    while at <= span[1]:
        try:
            sealed = history.sealed(at)
            held, left = history.held(at), history.left(at)
        except Damaged:
            return None
        if sealed is None or held is None or left is None or sealed["base"] != at or sealed["last"] > span[1]:
            return None
        if sum(entry.count for entry in held) != sealed["last"] - at + 1:
            return None
        for entry in left:
            _add(entries, entry)
        at = sealed["last"] + 1
    return list(entries.values())


def _add(entries: dict[str, RouteEntry], entry: RouteEntry) -> None:
    """Add the losses of a route. An entry of pieces alone has no records; readers drop a begun record by it."""
    if not entry.count and entry.route in entries:
        return
    if entry.count and entry.route in entries and not entries[entry.route].count:
        del entries[entry.route]
    known = entries.get(entry.route)
    entries[entry.route] = entry if known is None else known.plus(entry)
