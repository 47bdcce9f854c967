"""What the ledgers tell of segments that are not there any more.

    segments.jsonl   {"event": "sealed", "base": 1, "last": 250, "routes": …}          written by the daemon
    reclaim.jsonl    {"event": "reclaimed", "base": 1, "last": 250, …}                 before each deletion
    archive.jsonl    {"event": "archived", "route": …, "first": 1, "last": 250, …}     for each bundle

Ledgers can be lost, so every answer may be "unknown".
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from wald.store.directory import Root
from wald.store.ledger import read_ledger


class History:
    """The ledgers of a root, read when they are first asked about."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def reclaimed(self, sequence: int) -> dict[str, Any] | None:
        """The entry of the reclaimed segment that held ``sequence``."""
        return _segment_holding(self._reclaimed, sequence)

    def all_reclaimed(self, first: int, last: int) -> bool:
        """Whether the records ``first`` to ``last`` were reclaimed, every one."""
        while first <= last:
            entry = self.reclaimed(first)
            if entry is None:
                return False
            first = int(entry["last"]) + 1
        return True

    def archived(self, route: str | None, sequence: int) -> dict[str, Any] | None:
        """The entry of a bundle that holds ``sequence``; of any route's range if the route is not known."""
        entries = (entry for entry in self._archived if route is None or entry.get("route") in (route, None))
        return next((entry for entry in entries if entry["base"] <= sequence <= entry["last"]), None)

    def sealed(self, sequence: int) -> dict[str, Any] | None:
        """The entry of the sealed segment that held ``sequence``."""
        return _segment_holding(self._sealed, sequence)

    def routes_between(self, first: int, last: int) -> dict[str, int] | None:
        """The routes of the sealed segments that held ``first`` to ``last``, each with its last sequence there.

        None if the ledger does not tell.
        """
        routes: dict[str, int] = {}
        while first <= last:
            entry = self.sealed(first)
            if entry is None or not isinstance(entry.get("routes"), list):
                return None
            try:
                routes |= {str(name): int(final) for name, _count, _first, final, _bytes in entry["routes"]}
            except (ValueError, TypeError):
                return None
            first = int(entry["last"]) + 1
        return routes

    @cached_property
    def _sealed(self) -> list[dict[str, Any]]:
        return _entries(self._root.ledger / "segments.jsonl", "sealed", "base")

    @cached_property
    def _reclaimed(self) -> list[dict[str, Any]]:
        return _entries(self._root.ledger / "reclaim.jsonl", "reclaimed", "base")

    @cached_property
    def _archived(self) -> list[dict[str, Any]]:
        return _entries(self._root.ledger / "archive.jsonl", "archived", "first")


def _entries(path: Path, event: str, first: str) -> list[dict[str, Any]]:
    """The entries of one kind that have a sane range, under ``first`` and "last", by where the range begins."""
    found = []
    for entry in read_ledger(path).entries:
        begin, end = entry.get(first), entry.get("last")
        if entry.get("event") == event and isinstance(begin, int) and isinstance(end, int) and begin <= end:
            found.append(entry | {"base": begin})
    return sorted(found, key=itemgetter("base"))


def _segment_holding(entries: list[dict[str, Any]], sequence: int) -> dict[str, Any] | None:
    """Segments do not overlap, as bundles may."""
    number = bisect_right(entries, sequence, key=itemgetter("base")) - 1
    return entries[number] if number >= 0 and sequence <= entries[number]["last"] else None
