"""Which records a relief has dropped, by its line in the ledger: route by route, and exactly.

``dropped`` lists the routes with the first and the last of the records that go. Where others are between them, ``runs``
has the :mod:`wald.format.run_lengths` of the route, counted from its first record. Lines of older versions have no
``runs``: they do not say whether a record between the two was dropped.
"""

from __future__ import annotations

from wald.format.ledger_lines import Entry
from wald.format.run_lengths import BadRunLengths, spans_of, unpack
from wald.format.spans import Span, Spans


def runs_of(entry: Entry, route: Entry) -> list[Span] | None:
    """The dropped records (first, last) of one of the routes in a line; None: the line does not say.

    Raises:
        BadRunLengths: its runs do not decode.
    """
    first, last, runs, name = route["first"], route["last"], entry.get("runs"), str(route.get("route"))
    if isinstance(count := route.get("count"), int) and count > last - first:
        return [(first, last)]
    if not isinstance(runs, dict) or name not in runs:
        return None
    return list(spans_of(unpack(runs[name], last - first + 1), first))


def has_dropped(entry: Entry, route: Entry, sequence: int) -> bool | None:
    """Whether a record is among those that went of one of the routes in a line; None: the line does not say."""
    if not route["first"] <= sequence <= route["last"]:
        return False
    try:
        runs = runs_of(entry, route)
    except BadRunLengths:
        return None
    return None if runs is None else sequence in Spans(runs)


def holders(entry: Entry, sequence: int) -> list[tuple[Entry, bool]]:
    """The routes in the line of a deletion or a relief of which a record may be; each with whether that is certain."""
    routes = entry.get("dropped", entry.get("routes"))
    found = []
    for route in routes if isinstance(routes, list) else []:
        match route:
            case {"first": int(), "last": int()}:
                if (is_held := has_dropped(entry, route, sequence)) is not False:
                    found.append((route, is_held is True))
    return found
