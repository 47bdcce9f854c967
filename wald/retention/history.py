"""Look-ups in the ledgers (docs/format.md, "A ledger").

wald-reclaim writes a line before each deletion or shrink. Several ``reclaimed`` lines may share an ``evidence`` line. A
``kept`` line withdraws a deletion. A ledger may be missing, so every answer may be "unknown". Look-ups raise Damaged
only if they need damaged lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLine, LedgerLines
from wald.format.ledger_lines import ABOVE_U64, Entry
from wald.format.names import LEDGERS
from wald.format.sealed_index import RouteEntry, merge_routes
from wald.format.spans import BadRunLengths, Span, Spans, spans_of, unpack
from wald.format.times import utc_or_unknown
from wald.retention.missing import ReclaimedSegment


class Loss(NamedTuple):
    """Records that were given up."""

    extent: ReclaimedSegment
    reason: str
    is_unrestored: bool = False  # in no restored bundle, so never in this log
    saved_file: str = ""  # in the root, with the rest of their bytes
    records: int = 0  # upper limit: a shrink may have dropped some

    @property
    def starting_extent(self) -> ReclaimedSegment:
        """Extent with only the routes of which a record begins there."""
        if self.is_unrestored or self.extent.routes is None:  # a restore does not know the number of records
            return self.extent
        return self.extent._replace(routes=tuple(each for each in self.extent.routes if each.count))


class ShrunkRecord(NamedTuple):
    """Shrink that may have dropped a record, or else the newest one. ``is_dropped`` is None if unknown."""

    entry: Entry
    is_dropped: bool | None


class History:
    """Ledgers of a root, read on demand. Share ``ledgers``, which keep lines in memory."""

    def __init__(self, root: Root) -> None:
        self.ledgers = {name: LedgerLines(root.ledger / name) for name in LEDGERS}
        self._segments = self.ledgers["segments.jsonl"]
        self._reclaim = self.ledgers["reclaim.jsonl"]
        self._archive = self.ledgers["archive.jsonl"]
        self._generation = self._archive_lines = 0
        self._archived: dict[str, Spans] = {}  # wholly archived sequences, by route
        self._damaged_lines: list[tuple[Damaged, Span]] = []  # with their possible sequences

    def deletion_of(self, sequence: int) -> Entry | None:
        return next(self.deletions(sequence, sequence), None)

    def deletions(self, first: int = 1, last: int = ABOVE_U64) -> Iterator[Entry]:
        """Yield the deletions that were not withdrawn, newest first, with their routes."""
        for line in self._deletions(first, last):
            yield self.with_routes(line.entry)

    def latest_deletions(self, bases: Collection[int]) -> Iterator[Entry]:
        """Yield the effective deletions of these segments, without routes from shared lines."""
        decided_bases: set[int] = set()
        for line in self._reclaim.about_bases(bases):
            event = line.entry.get("event")
            if event in ("reclaimed", "kept") and line.low not in decided_bases:
                decided_bases.add(line.low)
                if line.is_range("reclaimed"):
                    yield line.entry

    def is_withdrawn(self, base: int, number: int) -> bool:
        """Return True if a line after line ``number`` withdraws the deletion."""
        return any(
            line.low == base and line.number > number and line.entry.get("event") == "kept"
            for line in self._reclaim.about(base, base)
        )

    def is_repeated(self, deletion: Entry, number: int) -> bool:
        """Return True if a deletion before line ``number`` has any of the same records."""
        return any(line.number < number for line in self._deletions(deletion["base"], deletion["last"]))

    def _deletions(self, first: int, last: int) -> Iterator[LedgerLine]:
        withdrawn: set[int] = set()
        for line in self._reclaim.about(first, last):
            if line.entry.get("event") == "kept":
                withdrawn.add(line.low)
            elif (
                line.is_range("reclaimed")
                and line.low not in withdrawn
                # A "kept" line is only about the base, which may be before ``first``.
                and (line.low >= first or not self.is_withdrawn(line.low, line.number))
            ):
                yield line

    def with_routes(self, deletion: Entry) -> Entry:
        """Add the routes from a shared ``evidence`` line, or return the entry unchanged if that line is lost."""
        if "evidence" not in deletion:
            return deletion
        base, evidence = deletion["base"], ("evidence", deletion["evidence"], deletion.get("at"))
        entries = (line.entry for line in self._reclaim.about(base, base))
        shared = next(
            (each for each in entries if (each.get("event"), each.get("base"), each.get("at")) == evidence), {}
        )
        if not isinstance(shared.get("routes"), list):
            return deletion
        sealed = None
        with suppress(Damaged):
            sealed = self.line_for_digest(base, deletion.get("sha256"))
        try:
            routes = _routes_in_range(deletion, shared) if sealed is None else _routes_when_sealed(sealed, shared)
            return {key: value for key, value in deletion.items() if key != "evidence"} | {"routes": list(routes)}
        except (KeyError, TypeError, ValueError, AttributeError):
            return deletion

    def reclaimed_segments(self, first: int, last: int) -> Iterator[ReclaimedSegment]:
        for entry in self.deletions(first, last):
            sealed: Entry = {}
            with suppress(Damaged):
                sealed = self.sealing_of(entry["base"]) or {}
            routes = route_entries(entry.get("routes"))
            if routes is None:
                routes = route_entries(sealed.get("routes"))
            else:
                for line in self.shrinks_before(entry):
                    routes = tuple(merge_routes(routes, route_entries(line.get("dropped")) or ()))
            times = (entry.get(key, sealed.get(key)) for key in ("earliest", "latest"))
            earliest_ns, latest_ns = (time_ns if isinstance(time_ns, int) else None for time_ns in times)
            yield ReclaimedSegment(entry["base"], entry["last"], routes, earliest_ns, latest_ns)

    def cursors_at_removal(self, route: str, first: int, last: int) -> Iterator[object]:
        """Yield the cursors of a route when records of it in the range were deleted, or None where they are unknown."""
        removals = [entry.get("routes") for entry in self.deletions(first, last)]
        removals += [entry.get("dropped") for entry in _entries(self._reclaim, "shrunk", first, last)]
        for routes in removals:
            entries = route_entries(routes)
            if entries is None or not isinstance(routes, list):
                yield None
                continue
            for entry, fields in zip(entries, routes, strict=True):
                if entry.route == route and entry.first <= last and entry.last >= first:
                    yield fields.get("cursors") if isinstance(fields, dict) else None

    def unexplained_spans(self, first: int, last: int) -> Iterator[Span]:
        """Yield the spans that no ledger line reports as reclaimed, skipped or lost."""
        for low, high in self._unreclaimed_spans(first, last):
            lines = self._segments.about(low, high)
            explained = ((line.low, line.high) for line in lines if line.is_range("skipped") or line.is_range("lost"))
            yield from Spans(explained).gaps(low, high)

    def _unreclaimed_spans(self, first: int, last: int) -> Iterator[Span]:
        # Only these spans need segments.jsonl, which may be damaged.
        if first <= last:
            yield from Spans((line.low, line.high) for line in self._deletions(first, last)).gaps(first, last)

    def losses(self, first: int, last: int) -> list[Loss]:
        spans = self._unreclaimed_spans(first, last)
        lines = (line for low, high in spans for line in self._segments.about(low, high) if line.is_range("lost"))
        by_number = {line.number: line for line in lines}
        return [_loss(line.entry) for line in sorted(by_number.values(), key=lambda line: line.low)]

    def is_given_up(self, sequence: int) -> bool:
        """Return True if ``sequence`` was lost, even if it was reclaimed later."""
        return next(_entries(self._segments, "lost", sequence, sequence), None) is not None

    def skip_of(self, sequence: int) -> Entry | None:
        return next(_entries(self._segments, "skipped", sequence, sequence), None)

    def segments_version(self) -> tuple[int, ...]:
        return self._segments.version()

    def shrinks(self, base: int) -> Iterator[Entry]:
        """Yield the shrinks of a segment, even unfinished ones, newest first."""
        return (entry for entry in _entries(self._reclaim, "shrunk", base, base) if entry.get("base") == base)

    def all_shrinks(self, first: int = 1) -> Iterator[Entry]:
        return _entries(self._reclaim, "shrunk", first, ABOVE_U64)

    def shrinks_before(self, deletion: Entry) -> Iterator[Entry]:
        """Yield the shrinks that led to the deleted file, newest first."""
        by_digest = {line.get("sha256"): line for line in self.shrinks(deletion["base"])}
        digest = deletion.get("sha256")
        # No digest leads to an unfinished shrink, which made no file.
        while (line := by_digest.pop(digest, None)) is not None:
            yield line
            digest = line.get("was_sha256")

    def shrunk_record(self, sequence: int) -> ShrunkRecord | None:
        """Return the shrink that may have dropped a record, or None if there was no shrink."""
        newest = None
        for entry in _entries(self._reclaim, "shrunk", sequence, sequence):
            is_dropped = _has_dropped(entry, sequence)
            if is_dropped is not False:
                return ShrunkRecord(entry, is_dropped)
            newest = newest or ShrunkRecord(entry, False)
        return newest

    def dropped_entries(self, base: int) -> tuple[RouteEntry, ...] | None:
        """Return all records that shrinks may have dropped from a segment, or None if unknown.

        The newest shrink may be unfinished, but its digests lead to all finished ones. After a repair that split a
        segment, the lines have the old base.
        """
        newest: dict[int, Entry] = {}
        for entry in _entries(self._reclaim, "shrunk", base, base):
            newest.setdefault(entry["base"], entry)
        dropped: list[RouteEntry] = []
        for low, entry in newest.items():
            for line in (entry, *self.shrinks_before({"base": low, "sha256": entry.get("was_sha256")})):
                routes = route_entries(line.get("dropped"))
                if routes is None:
                    return None
                dropped += routes
        return tuple(dropped) if newest else None

    def last_dropped(self, base: int) -> dict[str, int] | None:
        with suppress(Damaged):
            dropped = self.dropped_entries(base)
            return None if dropped is None else {each.route: each.last for each in merge_routes((), dropped)}
        return None

    def line_for_digest(self, base: int, sha256: object) -> Entry | None:
        """Return the line about the file with this digest, or else the line about the segment's sealing."""
        # A repair may have added a second "sealed" line.
        sealed = (entry for entry in _entries(self._segments, "sealed", base, base) if entry.get("base") == base)
        matching = (entry for entry in chain(self.shrinks(base), sealed) if entry.get("sha256") == sha256)
        return next(matching, None) or self.sealing_of(base)

    def sealing_of(self, sequence: int) -> Entry | None:
        return next(_entries(self._segments, "sealed", sequence, sequence), None)

    def sealed_routes(self, base: int) -> tuple[RouteEntry, ...] | None:
        entry = self.sealing_of(base)
        return None if entry is None or entry["base"] != base else route_entries(entry.get("routes"))

    def remaining_routes(self, base: int, *, is_shrunk: bool = False) -> tuple[RouteEntry, ...] | None:
        """Return the records that a segment may still have, by route, or None if unknown.

        A shrink's line is written before its file, so the newest line only proves the previous contents, unless
        ``is_shrunk`` says that the file exists.
        """
        entry, newest = self.sealing_of(base), next(self.shrinks(base), None)
        if entry is None or newest is None or newest["last"] != entry["last"]:
            return self.sealed_routes(base)
        former_digest = newest.get("was_sha256", "")
        count = sum(each.count for each in route_entries(entry.get("routes")) or ())
        is_whole = count == entry["last"] - entry["base"] + 1  # False after a repair of a shrunk segment
        if is_shrunk and is_whole and former_digest == entry.get("sha256"):
            return route_entries(newest.get("routes"))  # the file of the only shrink
        former = next((each for each in self.shrinks(base) if each.get("sha256") == former_digest), entry)
        return route_entries(former.get("routes")) if former["base"] == base else None

    def last_sealed(self) -> int:
        return self._segments.highest_sequence("sealed")

    def routes_between(self, first: int, last: int) -> dict[str, int] | None:
        """Return the last sequence of each route in sealed segments, or None if unknown."""
        lasts: dict[str, int] = {}
        while first <= last:
            entry = self.sealing_of(first)
            routes = None if entry is None else route_entries(entry.get("routes"))
            if entry is None or routes is None:
                return None
            lasts |= {each.route: each.last for each in routes}
            first = int(entry["last"]) + 1
        return lasts

    def newest_bundle(self, sequence: int) -> Entry | None:
        entries = _entries(self._archive, "archived", sequence, sequence)
        return max((entry for entry in entries if _has_archived(entry, sequence)), key=_recorded_ns, default=None)

    def archive_location(self, route: str | None, first: int, last: int) -> str | None:
        """Return the destination of the newest bundle with any of these records, or None if unknown."""
        with suppress(Damaged):
            entries = _entries(self._archive, "archived", first, last)
            ours = (entry for entry in entries if route in (None, entry.get("route")) and entry.get("dest"))
            newest = max(ours, key=_recorded_ns, default=None)
            return None if newest is None else str(newest["dest"])
        return None

    def all_archived(self, route: str, first: int, last: int) -> bool:
        self._read_new_bundles()
        if route in self._archived and self._archived[route].covers(first, last):
            return True
        for error, (low, high) in self._damaged_lines:
            if low <= last and first <= high:
                raise error.with_traceback(None)
        return False

    def archived_spans(self) -> Mapping[str, Spans]:
        """Return the wholly archived spans by route, as a new object if lines have disappeared."""
        self._read_new_bundles()
        for error, _ in self._damaged_lines:
            raise error.with_traceback(None)
        return self._archived

    def _read_new_bundles(self) -> None:
        lines = self._archive.oldest_first(
            self._archive_lines,
            with_routes=False,
            on_damage=lambda error, span: self._damaged_lines.append((error, span)),
        )
        for line in lines:
            if self._archive.generation != self._generation:
                break
            self._archive_lines = line.number
            if line.is_range("archived"):
                # The bundle has every record after ``after``, so it joins the bundle that ends there.
                after = line.entry.get("after")
                low = min(line.low, after + 1) if isinstance(after, int) else line.low
                self._archived.setdefault(str(line.entry.get("route")), Spans()).add(low, line.high)
        if self._archive.generation != self._generation:  # the lines read earlier no longer exist
            self._generation, self._archive_lines = self._archive.generation, 0
            self._archived, self._damaged_lines = {}, []
            self._read_new_bundles()


def candidate_routes(entry: Entry, sequence: int) -> list[tuple[Entry, bool]]:
    """Return the routes in a line that may have ``sequence``, each with True if it certainly does."""
    routes = entry.get("dropped", entry.get("routes"))
    candidates = []
    for route in routes if isinstance(routes, list) else []:
        match route:
            case {"first": int(first), "last": int(last)} if first <= sequence <= last:
                try:
                    runs = runs_of(entry, route)
                except BadRunLengths:
                    runs = None
                if runs is None or sequence in Spans(runs):
                    candidates.append((route, runs is not None))
    return candidates


def runs_of(entry: Entry, route: Entry) -> list[Span] | None:
    """Return a route's own sequences in a line, or None if unknown."""
    first, last, runs, name = route["first"], route["last"], entry.get("runs"), str(route.get("route"))
    if isinstance(count := route.get("count"), int) and count > last - first:
        return [(first, last)]
    if not isinstance(runs, dict) or name not in runs:
        return None
    return list(spans_of(unpack(runs[name], last - first + 1), first))


def bundle_member(entry: Entry, sequence: int) -> str | None:
    """Return the file in a bundle with ``sequence``."""
    members: list[tuple[int, str]] = []
    parts = entry.get("parts")
    for part in parts if isinstance(parts, list) else []:
        match part:
            case [int(first), str(member)] if first <= sequence:
                members.append((first, member))
    return max(members)[1] if members else None


def _entries(lines: LedgerLines, event: str, first: int, last: int) -> Iterator[Entry]:
    return (line.entry for line in lines.about(first, last) if line.is_range(event))


def _routes_when_sealed(sealed: Entry, shared: Entry) -> Iterator[Entry]:
    evidence = {
        each["route"]: {key: each[key] for key in ("cursors", "retired") if key in each} for each in shared["routes"]
    }
    for name, count, first, last, *_ in sealed["routes"]:
        yield {"route": name, "count": count, "first": first, "last": last} | evidence.get(name, {"cursors": {}})


def _routes_in_range(deletion: Entry, shared: Entry) -> Iterator[Entry]:
    for each in shared["routes"]:
        first, last = max(each["first"], deletion["base"]), min(each["last"], deletion["last"])
        if each["last"] < deletion["base"]:  # only pieces of a record that began earlier
            first, last = each["last"], each["last"]
        if first <= last:
            yield each | {"count": 0, "first": first, "last": last}


def _loss(entry: Entry) -> Loss:
    extent = ReclaimedSegment(entry["base"], entry["last"], route_entries(entry.get("routes")))
    at, length = utc_or_unknown(entry.get("at")), extent.last - extent.first + 1
    if entry.get("by") == "restore":
        return Loss(extent, f"not restored at {at}: {entry.get('why')}", is_unrestored=True, records=length)
    reason = f"given up by a repair at {at} ({entry.get('why', 'for an unknown reason')})"
    saved_file, records = str(entry.get("kept", "")), entry.get("records")
    if saved_file:
        reason += f"; the remaining bytes are in {saved_file}"
    return Loss(extent, reason, saved_file=saved_file, records=records if isinstance(records, int) else length)


def route_entries(routes: object) -> tuple[RouteEntry, ...] | None:
    entries = []
    for route in routes if isinstance(routes, list) else [None]:
        match route:
            case {"route": str(name), "count": int(count), "first": int(first), "last": int(last)}:
                entries.append(RouteEntry(name, count, first, last))
            case [str(), int(), int(), int()] | [str(), int(), int(), int(), int()]:  # not restored: no payload bytes
                entries.append(RouteEntry(*route))
            case _:
                return None
    return tuple(entries)


def _has_dropped(entry: Entry, sequence: int) -> bool | None:
    if route_entries(entry.get("dropped")) is None:
        return None
    candidates = candidate_routes(entry, sequence)
    return any(is_certain for _, is_certain in candidates) or (None if candidates else False)


def _has_archived(entry: Entry, sequence: int) -> bool:
    try:
        runs = unpack(entry["runs"], entry["last"] - entry["first"] + 1)
        return sequence in Spans(spans_of(runs, int(entry["after"]) + 1))
    except (KeyError, TypeError, ValueError):
        return True  # the line has no exact ranges


def _recorded_ns(entry: Entry) -> int:
    at = entry.get("at")
    return at if isinstance(at, int) else 0
