"""Whose the lost records were, as far as the ledger or what is left of an index says."""

from __future__ import annotations

from wald.errors import Damaged
from wald.format.sealed import BadSealed
from wald.format.tables import RouteEntry
from wald.store.files.directory import Segment
from wald.store.repairing.rescue import Span
from wald.store.retention.history import History
from wald.store.segments.compression import SealedFile

Batch = tuple[str, int, int, int]
"""A route; the first sequence of a batch of it, how many records begin in that, and the bytes of its payload."""


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
            table, names = sealed.index.batch_table(), [entry.route for entry in sealed.index.routes]
    except (Damaged, BadSealed, OSError):
        return None
    for base, count, number in zip(table.bases, table.counts, table.routes, strict=True):
        begin, end = max(first, base), min(last, base + count - 1)
        if begin <= end:
            _add(entries, RouteEntry(names[number], end - begin + 1, begin, end, 0))
    return _complete(entries, span)


def _by_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """By the lines about the sealing of segments all of whose records are lost."""
    entries: dict[str, RouteEntry] = {}
    at = span[0]
    while at <= span[1]:
        try:
            sealed = history.sealed(at)
            held = history.held(at)
        except Damaged:
            return None
        if sealed is None or held is None or sealed["base"] != at or sealed["last"] > span[1]:
            return None
        for entry in held:
            _add(entries, entry)
        at = sealed["last"] + 1
    return _complete(entries, span)


def _add(entries: dict[str, RouteEntry], entry: RouteEntry) -> None:
    known = entries.get(entry.route, entry._replace(count=0, payload_bytes=0))
    entries[entry.route] = RouteEntry(
        entry.route,
        known.count + entry.count,
        min(known.first, entry.first),
        max(known.last, entry.last),
        known.payload_bytes + entry.payload_bytes,
    )


def _complete(entries: dict[str, RouteEntry], span: Span) -> list[RouteEntry] | None:
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total == span[1] - span[0] + 1 else None
