"""Which records a relief has dropped, by its line in the ledger: route by route, and exactly.

``dropped`` lists the routes with the first and the last of the records that go. Where others are between them, ``runs``
has the numbers of :mod:`wald.format.turns` for the route, counted from its first record. Lines of older versions have
no ``runs``: of them it is not known whether a record between the two was dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wald.format.turns import BadTurns, pack, unpack
from wald.store.files.lines import Entry


def packed(runs: Iterable[tuple[int, int]], first: int) -> list[int] | str:
    """Runs of records (first, last), in order, as they stand in a line.

    Args:
        first: from which record on they are counted.
    """
    turns, at = [], first
    for begin, last in runs:
        turns += [begin - at, last + 1 - begin]
        at = last + 1
    return pack(turns)


def runs_of(entry: Entry, route: Entry) -> list[tuple[int, int]] | None:
    """The dropped records (first, last) of one of the routes in a line; None: the line does not say.

    Raises:
        BadTurns: its runs do not decode.
    """
    first, last, runs, name = route["first"], route["last"], entry.get("runs"), str(route.get("route"))
    if isinstance(count := route.get("count"), int) and count > last - first:
        return [(first, last)]
    if not isinstance(runs, dict) or name not in runs:
        return None
    return list(_unpacked(unpack(runs[name], last - first + 1), first))


def _unpacked(turns: Iterable[int], at: int) -> Iterator[tuple[int, int]]:
    numbers = iter(turns)
    for gap, count in zip(numbers, numbers, strict=True):
        yield at + gap, at + gap + count - 1
        at += gap + count


def has_dropped(entry: Entry, route: Entry, sequence: int) -> bool | None:
    """Whether a record is among those that went of one of the routes in a line; None: the line does not say."""
    if not route["first"] <= sequence <= route["last"]:
        return False
    try:
        runs = runs_of(entry, route)
    except BadTurns:
        return None
    return None if runs is None else any(first <= sequence <= last for first, last in runs)


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
