"""What the ledgers say about segments that are not there any more, and about bundles.

    segments.jsonl   {"event": "sealed", "base": 1, "last": 250, "routes": …}          written by the daemon
                     {"event": "skipped", "base": 251, "last": 300, "why": …}          a start passed over these
                     {"event": "lost", "base": 301, "last": 310, "why": …, …}          given up by wald repair
    reclaim.jsonl    {"event": "reclaimed", "base": 1, "last": 250, …}                 before each deletion
                     {"event": "kept", "base": 1}                                      that deletion was not carried out
    archive.jsonl    {"event": "archived", "route": …, "first": 1, "last": 250, …}     for each bundle

Ledgers can be lost, so every answer may be "unknown". Of a ledger that has grown the new lines are read. Of one that is
damaged nothing is believed: every question to it raises Damaged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from wald.errors import Damaged
from wald.format.sealed import RouteEntry
from wald.format.times import at_utc
from wald.store.files.directory import Root
from wald.store.files.ledger import Bookmark, entries_behind
from wald.store.files.regular import open_file
from wald.store.retention.missing import ReclaimedSegment, RouteRange

Entry = dict[str, Any]
"""A line of a ledger; ``Any``: it is JSON."""


class Loss(NamedTuple):
    """Records that were given up: what is known of them; why and when, and where their bytes are, as a phrase."""

    held: ReclaimedSegment
    reason: str


class History:
    """The ledgers of a root, read when they are asked about."""

    def __init__(self, root: Root) -> None:
        self._sealed = _Ledger(root.ledger / "segments.jsonl", "base")
        self._skipped = _Ledger(root.ledger / "segments.jsonl", "base")
        self._lost = _Ledger(root.ledger / "segments.jsonl", "base")
        self._reclaimed = _Ledger(root.ledger / "reclaim.jsonl", "base")
        self._archived = _Ledger(root.ledger / "archive.jsonl", "first")
        self._covered: dict[str, list[tuple[int, int]]] = {}
        self._covered_by: list[Entry] = []

    def reclaimed(self, sequence: int) -> Entry | None:
        """The entry of the reclaimed segment that held ``sequence``."""
        return _segment_holding(self.deletions(), sequence)

    def unexplained(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs (first, last) from ``first`` to ``last`` that no line says to be reclaimed, passed over or lost."""
        for begin, end in _outside(self.deletions(), first, last):
            # The other ledger only where it matters: while that is damaged, what was reclaimed is known all the same.
            for skipped_from, skipped_to in _outside(self._skips(), begin, end):
                yield from _outside(self._losses(), skipped_from, skipped_to)

    def gone(self, first: int, last: int) -> list[ReclaimedSegment]:
        """What reclaimed segments held of the records ``first`` to ``last``."""
        return [self._gone(entry) for entry in _between(self.deletions(), first, last)]

    def _gone(self, entry: Entry) -> ReclaimedSegment:
        """The line of the deletion gives the routes, that of the sealer the times, which may be unknown."""
        sealed: Entry = {}
        with suppress(Damaged):
            sealed = self.sealed(entry["base"]) or {}
        routes = _held(entry.get("routes"))
        earliest, latest = (entry.get(key, sealed.get(key)) for key in ("earliest", "latest"))
        return ReclaimedSegment(
            entry["base"],
            entry["last"],
            _held(sealed.get("routes")) if routes is None else routes,
            earliest if isinstance(earliest, int) else None,
            latest if isinstance(latest, int) else None,
        )

    def skipped(self, sequence: int) -> Entry | None:
        """The entry of the start that passed over ``sequence``, which no record has had in this log."""
        return _segment_holding(self._skips(), sequence)

    def _skips(self) -> list[Entry]:
        return self._skipped.entries("skipped")

    def losses(self, first: int, last: int) -> list[Loss]:
        """What ``wald repair`` gave up of the records ``first`` to ``last``, because it could not be read any more."""
        spans = _outside(self.deletions(), first, last)  # the other ledger only where it matters, as above
        return [_loss(entry) for begin, end in spans for entry in _between(self._losses(), begin, end)]

    def _losses(self) -> list[Entry]:
        return self._lost.entries("lost")

    def deletions(self) -> list[Entry]:
        """The entries of all reclaimed segments, oldest first."""
        return self._reclaimed.entries("reclaimed", undone_by="kept")

    def archived(self, sequence: int) -> Entry | None:
        """The entry of the bundle that holds ``sequence``; of several, the last one made."""
        entries = self._archived.entries("archived")
        holding = (entry for entry in entries if entry["first"] <= sequence <= entry["last"])
        return max((entry for entry in holding if _in_runs(entry, sequence)), key=_made, default=None)

    def archive_of(self, route: str | None, first: int, last: int) -> str | None:
        """Where the last bundle was brought that has records of ``route`` (None: any) from ``first`` to ``last``.

        For a hint: None, too, where the ledger is damaged.
        """
        try:
            entries = self._archived.entries("archived")
        except Damaged:
            return None
        overlapping = (entry for entry in entries if entry["first"] <= last and first <= entry["last"])
        ours = (entry for entry in overlapping if route in (None, entry.get("route")) and entry.get("dest"))
        found = max(ours, key=_made, default=None)
        return None if found is None else str(found["dest"])

    def all_archived(self, route: str, first: int, last: int) -> bool:
        """Whether every record of ``route`` numbered ``first`` to ``last`` is in a bundle."""
        entries = self._archived.entries("archived")
        if self._covered_by is not entries:
            self._covered_by, self._covered = entries, _covered(entries)
        spans = self._covered.get(route, [])
        number = bisect_right(spans, first, key=itemgetter(0)) - 1
        return number >= 0 and last <= spans[number][1]

    def sealed(self, sequence: int) -> Entry | None:
        """The entry of the sealed segment that held ``sequence``."""
        return _segment_holding(self._sealed.entries("sealed"), sequence)

    def held(self, base: int) -> list[RouteEntry] | None:
        """What segment ``base`` held of each route when it was sealed; None if no whole line says."""
        entry = self.sealed(base)
        routes = entry.get("routes") if entry is not None and entry["base"] == base else None
        held = []
        for route in routes if isinstance(routes, list) else [None]:
            match route:
                case [str(name), int(count), int(first), int(last), int(payload_bytes)]:
                    held.append(RouteEntry(name, count, first, last, payload_bytes))
                case _:
                    return None
        return held

    def last_sealed(self) -> int:
        """The last sequence in any segment that was ever sealed; 0: no ledger lists one."""
        return max((int(entry["last"]) for entry in self._sealed.entries("sealed")), default=0)

    def routes_between(self, first: int, last: int) -> dict[str, int] | None:
        """The routes of the sealed segments that held ``first`` to ``last``, each with its last sequence there.

        None if the ledger does not say.
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


def runs_of(entry: Entry) -> Iterator[tuple[int, int]]:
    """The sequences in the bundle of an "archived" entry, as (first, last) of each run; [first, last] if it has none.

    ``runs`` counts from ``after``: so many sequences of other routes, so many of this one, and so on.
    """
    runs = entry.get("runs")
    if not isinstance(runs, list | array):
        yield entry["first"], entry["last"]
        return
    at = int(entry["after"])
    for gap, count in zip(runs[::2], runs[1::2], strict=True):
        yield at + gap + 1, at + gap + count
        at += gap + count


def member_of(entry: Entry, sequence: int) -> str | None:
    """The file in the bundle of an "archived" entry that holds ``sequence``; None if the entry does not say.

    ``parts`` are the first record and the name of each such file.
    """
    parts = entry.get("parts")
    found: tuple[int, str] | None = None
    for part in parts if isinstance(parts, list) else []:
        match part:
            case [int(first), str(member)] if first <= sequence and (found is None or found[0] < first):
                found = first, member
    return found and found[1]


@dataclass(slots=True)
class _Ledger:
    """The entries of one file that have a sane range, sorted by its beginning; read on when the file has grown.

    Attributes:
        first: the key under which an entry has the beginning of its range; the end is under "last".
    """

    path: Path
    first: str
    _seen: tuple[int, ...] | None = None
    _bookmark: Bookmark = field(default_factory=Bookmark)
    _found: dict[int, Entry] = field(default_factory=dict)
    _entries: list[Entry] = field(default_factory=list)

    def entries(self, event: str, *, undone_by: str = "") -> list[Entry]:
        """The entries of one kind, oldest range first."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen != self._seen:
            try:
                file = open_file(self.path)
            except FileNotFoundError:
                return []
            with file:
                if not self._bookmark.holds(file):
                    self._bookmark, self._found = Bookmark(), {}
                for entry in entries_behind(self._bookmark, file, self.path):
                    self._take(entry, event, undone_by)
            self._entries, self._seen = sorted(self._found.values(), key=itemgetter(self.first)), seen
        return self._entries

    def _take(self, entry: Entry, event: str, undone_by: str) -> None:
        begin, end = entry.get(self.first), entry.get("last")
        if not isinstance(begin, int):
            return
        key = begin if undone_by else self._bookmark.number
        if entry.get("event") == event and isinstance(end, int) and begin <= end:
            self._found[key] = _compact(entry)
        elif undone_by and entry.get("event") == undone_by:
            self._found.pop(key, None)


def _compact(entry: Entry) -> Entry:
    """The same, with its runs as eight bytes each: where routes take turns there are two for every record."""
    try:
        return entry | {"runs": array("Q", entry["runs"])}
    except (KeyError, TypeError, OverflowError):
        return entry


def _between(entries: list[Entry], first: int, last: int) -> list[Entry]:
    """The entries that hold any of ``first`` to ``last``."""
    begin = max(0, bisect_right(entries, first, key=itemgetter("base")) - 1)
    end = bisect_right(entries, last, key=itemgetter("base"))
    return [entry for entry in entries[begin:end] if entry["last"] >= first]


def _outside(entries: list[Entry], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The runs (first, last) from ``first`` to ``last`` that are in no entry."""
    for entry in _between(entries, first, last):
        if first < entry["base"]:
            yield first, int(entry["base"]) - 1
        first = max(first, int(entry["last"]) + 1)
    if first <= last:
        yield first, last


def _segment_holding(entries: list[Entry], sequence: int) -> Entry | None:
    """Segments do not overlap, as bundles may."""
    number = bisect_right(entries, sequence, key=itemgetter("base")) - 1
    return entries[number] if number >= 0 and sequence <= entries[number]["last"] else None


def _loss(entry: Entry) -> Loss:
    held = ReclaimedSegment(entry["base"], entry["last"], _held(entry.get("routes")))
    reason = f"given up by wald repair at {at_utc(entry.get('at'))} ({entry.get('why', 'it is not known why')})"
    kept = entry.get("kept")
    return Loss(held, f"{reason}; what is left of their bytes is in {kept}" if kept else reason)


def _covered(entries: list[Entry]) -> dict[str, list[tuple[int, int]]]:
    """Per route the sequences, (first, last), between which no record is missing in the bundles; by ``after``, sorted.

    A bundle holds every record of its route behind ``after``, so it joins the one that ends there.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        of_route = spans.setdefault(str(entry.get("route")), [])
        after = entry.get("after")
        begin = after + 1 if isinstance(after, int) else entry["first"]
        if of_route and begin <= of_route[-1][1] + 1:
            begin, end = of_route[-1]
            of_route[-1] = begin, max(end, entry["last"])
        else:
            of_route.append((begin, entry["last"]))
    return spans


def _in_runs(entry: Entry, sequence: int) -> bool:
    try:
        return any(first <= sequence <= last for first, last in runs_of(entry))
    except (KeyError, TypeError, ValueError):
        return True  # the range holds it, and the ledger has nothing more exact


def _held(routes: object) -> tuple[RouteRange, ...] | None:
    """The routes as a line about a deletion has them, or one about a sealed segment; None if it does not make sense."""
    held = []
    for route in routes if isinstance(routes, list) else [None]:
        match route:
            case {"route": str(name), "count": int(count), "first": int(first), "last": int(last)}:
                held.append(RouteRange(name, count, first, last))
            case [str(name), int(count), int(first), int(last), *_]:
                held.append(RouteRange(name, count, first, last))
            case _:
                return None
    return tuple(held)


def _made(entry: Entry) -> int:
    at = entry.get("at")
    return at if isinstance(at, int) else 0
