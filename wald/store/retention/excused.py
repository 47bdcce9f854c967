"""What a deletion's line leaves to others: what the segment held, and the cursors that made its deletion legal.

A line ``reclaimed`` that has ``excused`` instead of ``routes`` shares the line ``excused`` with that ``base``. That one
says what several segments held together, and where the cursors of each route were. What this segment held of it is in
the line about its sealing, whose digest is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from wald.format.ledger_lines import Entry

_EXCUSE = ("cursors", "retired")


def shares(deletion: Entry, line: Entry) -> bool:
    """Whether ``line`` is the one that a deletion shares."""
    same = all(line.get(key) == deletion.get(of) for key, of in (("base", "excused"), ("at", "at")))
    return same and line.get("event") == "excused"


def completed(deletion: Entry, shared: Entry, sealed: Entry | None) -> Entry:
    """The line of a deletion with ``routes`` of its own; without any if the lines make no sense.

    Args:
        sealed: the line about the sealing; None: there is none. Then a route has a count of 0, and at most the records
            that it has in all segments of the shared line.
    """
    routes = shared.get("routes")
    if not isinstance(routes, list):
        return deletion
    held = _within(deletion, routes) if sealed is None else _sealed(sealed, routes)
    try:
        return {key: value for key, value in deletion.items() if key != "excused"} | {"routes": list(held)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return deletion


def _sealed(sealed: Entry, routes: list[Entry]) -> Iterator[Entry]:
    """What was in the segment, each route with its excuse; one that the shared line does not have has none."""
    excuses = {each["route"]: {key: each[key] for key in _EXCUSE if key in each} for each in routes}
    for name, count, first, last, *_ in sealed["routes"]:
        yield {"route": name, "count": count, "first": first, "last": last} | excuses.get(name, {"cursors": {}})


def _within(deletion: Entry, routes: list[Entry]) -> Iterator[Entry]:
    """What may have been in the segment."""
    for each in routes:
        first, last = max(each["first"], deletion["base"]), min(each["last"], deletion["last"])
        if each["last"] < deletion["base"]:  # only pieces of a record that began before the segment
            first, last = each["last"], each["last"]
        if first <= last:
            yield each | {"count": 0, "first": first, "last": last}
