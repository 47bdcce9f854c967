"""History of missing segments, read from the ledgers.

Which records a relief has dropped, by its line in the ledger: route by route, and exactly.

``dropped`` lists the routes with the first and the last of the records that go. Where others are between them, ``runs``
has the :mod:`wald.format.spans` of the route, counted from its first record. Lines of older versions have no
``runs``: they do not say whether a record between the two was dropped.

What a deletion's line leaves to others: what the segment held, and the cursors that made its deletion legal.

A line ``reclaimed`` that has ``excused`` instead of ``routes`` shares the line ``excused`` with that ``base``. That one
says what several segments held together, and where the cursors of each route were. What this segment held of it is in
the line about its sealing, whose digest is the same.

What the ledgers say about segments that are not there any more, and about bundles: look-ups and iterators.

    segments.jsonl   {"event": "sealed", "base": 1, "last": 250, "routes": …}          written by the daemon
                     {"event": "skipped", "base": 251, "last": 300, "why": …}          a start passed over these
                     {"event": "lost", "base": 301, "last": 310, "why": …, …}          given up by wald repair, or
                                                                                       (by restore) in no bundle
    reclaim.jsonl    {"event": "reclaimed", "base": 1, "last": 250, …}                 before each deletion
                     {"event": "excused", "base": 1, "last": 900, "routes": …}         before those that share it
                     {"event": "kept", "base": 1}                                      that deletion was not carried out
                     {"event": "relieved", "base": 1, "last": 250, "dropped": …}       before each relief
    archive.jsonl    {"event": "archived", "route": …, "first": 1, "last": 250, …}     for each bundle

Ledgers can be lost, so every answer may be "unknown". A look-up reads the few lines that it needs, and what is new
since the one before; no method returns all lines at once. Of a ledger that is damaged nothing is believed: every
question to it raises Damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import Line, Lines
from wald.format.ledger_lines import NO_SEQUENCE, Entry
from wald.format.names import LEDGERS
from wald.format.sealed_index import RouteEntry
from wald.format.spans import BadRunLengths, Span, Spans, spans_of, unpack
from wald.format.times import utc_or_unknown
from wald.retention.missing import ReclaimedSegment, lasts_of


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


_JUDGING = ("reclaimed", "kept")  # the newest of these lines says whether a segment was deleted


class Loss(NamedTuple):
    """Records that were given up: what is known of them; why and when, and where their bytes are, as a phrase.

    Attributes:
        unrestored: whether they were never in this log, because a restore found them in no bundle.
        kept: the file in the root that has what is left of them; "" if there is none.
        records: how many there were at most; fewer than ``held`` spans if relief had dropped some before.
    """

    held: ReclaimedSegment
    reason: str
    unrestored: bool = False
    kept: str = ""
    records: int = 0

    @property
    def begun(self) -> ReclaimedSegment:
        """The records that began in ``held``, without routes of which it had only later pieces."""
        if self.unrestored or self.held.routes is None:  # a restore does not know how many records there were
            return self.held
        return self.held._replace(routes=tuple(each for each in self.held.routes if each.count))


class Relief(NamedTuple):
    """What the ledger says of a record whose segment was relieved.

    Attributes:
        entry: of the relief that may have dropped it; else of the newest one.
        dropped: whether it was dropped; None: the entries only count the records of each route, and do not say.
    """

    entry: Entry
    dropped: bool | None


class History:
    """The ledgers of a root, read when they are asked about.

    Attributes:
        ledgers: their lines, by the name of the active file; two readers of one ledger would cost its memory twice.
    """

    def __init__(self, root: Root) -> None:
        self.ledgers = {name: Lines(root.ledger / name) for name in LEDGERS}
        self._segments = self.ledgers["segments.jsonl"]
        self._reclaim = self.ledgers["reclaim.jsonl"]
        self._archive = self.ledgers["archive.jsonl"]
        self._bundled = _Bundled(self._archive)

    def reclaimed(self, sequence: int) -> Entry | None:
        """The entry of the reclaimed segment that held ``sequence``."""
        return next(self.deletions(sequence, sequence), None)

    def unexplained(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs (first, last) from ``first`` to ``last`` that no line says to be reclaimed, passed over or lost."""
        for begin, end in self._not_reclaimed(first, last):
            about = self._segments.about(begin, end)
            excused = ((line.low, line.high) for line in about if line.is_range("skipped") or line.is_range("lost"))
            yield from Spans(excused).outside(begin, end)

    def _not_reclaimed(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The other ledger is asked only about these: while it is damaged, what was reclaimed is known all the same."""
        if first <= last:
            yield from Spans((line.low, line.high) for line in self._deletions(first, last)).outside(first, last)

    def gone(self, first: int, last: int) -> Iterator[ReclaimedSegment]:
        """What reclaimed segments held of the records ``first`` to ``last``, in no order."""
        for entry in self.deletions(first, last):
            yield self._gone(entry)

    def _gone(self, entry: Entry) -> ReclaimedSegment:
        """The line of the deletion gives the routes, that of the sealer the times, which may be unknown."""
        sealed: Entry = {}
        with suppress(Damaged):
            sealed = self.sealed(entry["base"]) or {}
        routes = self._with_dropped(entry, _held(entry.get("routes")))
        earliest, latest = (entry.get(key, sealed.get(key)) for key in ("earliest", "latest"))
        return ReclaimedSegment(
            entry["base"],
            entry["last"],
            _held(sealed.get("routes")) if routes is None else routes,
            earliest if isinstance(earliest, int) else None,
            latest if isinstance(latest, int) else None,
        )

    def _with_dropped(self, entry: Entry, left: tuple[RouteEntry, ...] | None) -> tuple[RouteEntry, ...] | None:
        """What a deleted segment held before it was relieved, if it was, by what was ``left`` of it."""
        held = {each.route: each for each in left or ()}
        for line in self.reliefs_before(entry):
            for dropped in _held(line.get("dropped")) or ():
                left_of = held.get(dropped.route)
                held[dropped.route] = dropped if left_of is None else dropped.plus(left_of)
        return left if left is None else tuple(held.values())

    def reliefs_before(self, deletion: Entry) -> Iterator[Entry]:
        """The entries of the reliefs that had made the file which was deleted, the newest first."""
        made = {line.get("sha256"): line for line in self.reliefs(deletion["base"])}
        digest = deletion.get("sha256")
        # A relief that was not carried out has made no file, so its digest is met nowhere.
        while (line := made.pop(digest, None)) is not None:
            yield line
            digest = line.get("was_sha256")

    def reliefs(self, base: int) -> Iterator[Entry]:
        """The entries of the reliefs of segment ``base``, also of those that were not carried out; the newest first."""
        for line in _of(self._reclaim.about(base, base), "relieved"):
            if line.low == base:
                yield line.entry

    def all_reliefs(self, first: int = 1) -> Iterator[Entry]:
        """The same of every segment with a record from ``first`` on."""
        return (line.entry for line in _of(self._reclaim.about(first, NO_SEQUENCE), "relieved"))

    def made_by(self, base: int, sha256: object) -> Entry | None:
        """The entry that says what segment ``base`` held when it had this digest: of a relief, or of its sealing."""
        sealed = (line.entry for line in _of(self._segments.about(base, base), "sealed") if line.low == base)
        entries = chain(self.reliefs(base), sealed)  # a repair may have written another line "sealed"
        return next((entry for entry in entries if entry.get("sha256") == sha256), None) or self.sealed(base)

    def relief(self, sequence: int) -> Relief | None:
        """Whether relief has dropped ``sequence``; None if its segment was not relieved."""
        entries = [line.entry for line in _of(self._reclaim.about(sequence, sequence), "relieved")]
        if not entries:
            return None
        left = _among(sequence, _held(entries[0].get("routes")))
        for entry in entries:
            dropped = _dropped(sequence, entry)
            if dropped is not False:
                return Relief(entry, not left if dropped is None and left is not None else dropped)
        return Relief(entries[0], None if left is None else False)

    def dropped(self, base: int) -> tuple[RouteEntry, ...] | None:
        """Return the most that reliefs can have dropped of segment ``base``, by the ledger alone; None if unknown.

        The file of the newest relief may be missing; its chain of digests contains all earlier reliefs that count.
        A repair may have made the segment of a part of another one, of which the lines are.
        """
        newest: dict[int, Entry] = {}
        for line in _of(self._reclaim.about(base, base), "relieved"):
            newest.setdefault(line.low, line.entry)
        reliefs: list[Entry] = []
        for low, entry in newest.items():
            reliefs += entry, *self.reliefs_before({"base": low, "sha256": entry.get("was_sha256")})
        held = [_held(entry.get("dropped")) for entry in reliefs]
        return None if None in held or not held else tuple(each for of_one in held for each in of_one or ())

    def dropped_lasts(self, base: int) -> dict[str, int] | None:
        """The last sequence of each route in :meth:`dropped`; None if unknown, or if the ledger is damaged."""
        with suppress(Damaged):
            dropped = self.dropped(base)
            return None if dropped is None else lasts_of(dropped)
        return None

    def skipped(self, sequence: int) -> Entry | None:
        """The entry of the start that passed over ``sequence``, which no record has had in this log."""
        return next((line.entry for line in _of(self._segments.about(sequence, sequence), "skipped")), None)

    def is_given_up(self, sequence: int) -> bool:
        """Return True if a line says that ``sequence`` is lost, even if it was reclaimed since."""
        return any(_of(self._segments.about(sequence, sequence), "lost"))

    def mark(self) -> tuple[int, ...]:
        """Return a value that changes with each line about segments."""
        return self._segments.mark()

    def losses(self, first: int, last: int) -> list[Loss]:
        """What of ``first`` to ``last`` ``wald repair`` gave up as unreadable, or a restore found in no bundle."""
        spans = self._not_reclaimed(first, last)
        lines = (line for begin, end in spans for line in _of(self._segments.about(begin, end), "lost"))
        lost = {line.number: line for line in lines}
        return [_loss(line.entry) for line in sorted(lost.values(), key=lambda line: line.low)]

    def deletions(self, first: int = 1, last: int = NO_SEQUENCE) -> Iterator[Entry]:
        """The entries of the reclaimed segments with any of ``first`` to ``last``, the newest deletion first."""
        for line in self._deletions(first, last):
            yield self.completed(line.entry)

    def completed(self, deletion: Entry) -> Entry:
        """The entry of a deletion with its routes, where they are in other lines; without, if those are lost."""
        if "excused" not in deletion:
            return deletion
        about = (line.entry for line in self._reclaim.about(deletion["base"], deletion["base"]))
        shared = next((entry for entry in about if shares(deletion, entry)), None)
        sealed = None
        with suppress(Damaged):
            sealed = self.made_by(deletion["base"], deletion.get("sha256"))
        return deletion if shared is None else completed(deletion, shared, sealed)

    def _deletions(self, first: int, last: int) -> Iterator[Line]:
        """The lines of the deletions that were not taken back."""
        taken_back: set[int] = set()
        for line in self._reclaim.about(first, last):
            if line.entry.get("event") == "kept":
                taken_back.add(line.low)
            elif (
                line.is_range("reclaimed") and line.low not in taken_back and (line.low >= first or self._stands(line))
            ):
                yield line

    def is_taken_back(self, base: int, number: int) -> bool:
        """Whether a later line takes the deletion of segment ``base`` back that has this number in the ledger."""
        about = _of_segment(self._reclaim.about(base, base), base)
        return any(line.number > number and line.entry.get("event") == "kept" for line in about)

    def is_repeated(self, deletion: Entry, number: int) -> bool:
        """Whether an earlier deletion, which stands, has any of the records of the one with this number."""
        return any(line.number < number for line in self._deletions(deletion["base"], deletion["last"]))

    def _stands(self, deletion: Line) -> bool:
        """Whether no later line takes a deletion back; the segment may have been deleted again behind that one."""
        return not self.is_taken_back(deletion.low, deletion.number)

    def deletions_of(self, bases: Collection[int]) -> Iterator[Entry]:
        """Yield the deletions of these segments that were not taken back, without the routes of shared lines."""
        judged: set[int] = set()
        for line in self._reclaim.about_bases(bases):
            event = line.entry.get("event")
            if event in _JUDGING and line.low not in judged:
                judged.add(line.low)
                if event == "reclaimed" and line.is_range("reclaimed"):
                    yield line.entry

    def archived(self, sequence: int) -> Entry | None:
        """The entry of the bundle that holds ``sequence``; of several, the last one made."""
        lines = _of(self._archive.about(sequence, sequence), "archived")
        return max((line.entry for line in lines if _in_runs(line.entry, sequence)), key=_made, default=None)

    def archive_of(self, route: str | None, first: int, last: int) -> str | None:
        """Where the last bundle was brought that has records of ``route`` (None: any) from ``first`` to ``last``.

        For a hint: None, too, where the ledger is damaged.
        """
        with suppress(Damaged):
            lines = _of(self._archive.about(first, last), "archived")
            ours = (line.entry for line in lines if route in (None, line.entry.get("route")) and line.entry.get("dest"))
            found = max(ours, key=_made, default=None)
            return None if found is None else str(found["dest"])
        return None

    def all_archived(self, route: str, first: int, last: int) -> bool:
        """Whether every record of ``route`` numbered ``first`` to ``last`` is in a bundle."""
        return self._bundled.covers(route, first, last)

    def bundled(self) -> Mapping[str, Spans]:
        """Of each route the runs between whose ends no record of it is missing in the bundles.

        It is the same object, with more in it, as long as the ledger only grows.
        """
        return self._bundled.routes()

    def sealed(self, sequence: int) -> Entry | None:
        """The entry of the sealed segment that held ``sequence``."""
        return next((line.entry for line in _of(self._segments.about(sequence, sequence), "sealed")), None)

    def held(self, base: int) -> list[RouteEntry] | None:
        """What segment ``base`` held of each route when it was sealed; None if no whole line says."""
        entry = self.sealed(base)
        return None if entry is None or entry["base"] != base else _entries(entry.get("routes"))

    def left(self, base: int, *, relieved: bool = False) -> list[RouteEntry] | None:
        """What segment ``base`` held of each route at most when its file was last seen.

        A line about a relief is written before that, so the newest one proves only which form there was then.

        Args:
            relieved: whether the file is known to be that of a relief.
        """
        entry, relief = self.sealed(base), next(self.reliefs(base), None)
        if entry is None or relief is None or relief["last"] != entry["last"]:
            return self.held(base)
        was = relief.get("was_sha256", "")
        if relieved and was == entry.get("sha256") and _is_whole(entry):
            return _entries(relief.get("routes"))  # the only form of which anything was dropped
        former = next((each for each in self.reliefs(base) if each.get("sha256") == was), entry)
        return _entries(former.get("routes")) if former["base"] == base else None

    def last_sealed(self) -> int:
        """The last sequence in any segment that was ever sealed; 0: no ledger lists one."""
        return self._segments.highest("sealed")

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


def history_runs_of(entry: Entry) -> Iterator[Span]:
    """The sequences in the bundle of an "archived" entry, as (first, last) of each run; [first, last] if it has none.

    Raises:
        BadRunLengths: its ``runs`` are not what :mod:`wald.format.spans` writes.
    """
    if "runs" not in entry:
        yield entry["first"], entry["last"]
        return
    yield from spans_of(unpack(entry["runs"], entry["last"] - entry["first"] + 1), int(entry["after"]) + 1)


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


class _Bundled:
    """Runs of each route between whose ends no record of it is missing in the bundles."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._generation = self._read = 0
        self._routes: dict[str, Spans] = {}
        self._unread: list[tuple[Damaged, tuple[int, int]]] = []
        """Damaged lines, and the sequences that they may be about."""

    def covers(self, route: str, first: int, last: int) -> bool:
        """Return True if none of ``first`` to ``last`` is missing.

        Raises:
            Damaged: the lines that would show it cannot be read.
        """
        self._read_new()
        if route in self._routes and self._routes[route].covers(first, last):
            return True
        for error, (low, high) in self._unread:
            if low <= last and first <= high:
                raise error.with_traceback(None)
        return False

    def routes(self) -> Mapping[str, Spans]:
        """Return the runs of each route.

        Raises:
            Damaged: some lines cannot be read.
        """
        self._read_new()
        for error, _ in self._unread:
            raise error.with_traceback(None)
        return self._routes

    def _read_new(self) -> None:
        for line in self._lines.oldest_first(behind=self._read, listed=False, on_damage=self._note_damage):
            if self._lines.generation != self._generation:
                break
            self._read = line.number
            if line.is_range("archived"):
                self._routes.setdefault(str(line.entry.get("route")), Spans()).add(*_archived_run(line))
        if self._lines.generation != self._generation:  # the lines that were read no longer exist
            self._generation, self._read, self._routes, self._unread = self._lines.generation, 0, {}, []
            self._read_new()

    def _note_damage(self, error: Damaged, span: tuple[int, int]) -> None:
        self._unread.append((error, span))


def _archived_run(line: Line) -> tuple[int, int]:
    """Return the first and the last sequence between which a bundle has every record of its route.

    It has every record behind ``after``, so it joins the bundle that ends there.
    """
    after = line.entry.get("after")
    return min(line.low, after + 1) if isinstance(after, int) else line.low, line.high


def _of_segment(lines: Iterator[Line], base: int) -> Iterator[Line]:
    return (line for line in lines if line.low == base)


def _of(lines: Iterator[Line], event: str) -> Iterator[Line]:
    return (line for line in lines if line.is_range(event))


def _loss(entry: Entry) -> Loss:
    held = ReclaimedSegment(entry["base"], entry["last"], _held(entry.get("routes")))
    if entry.get("by") == "restore":
        return Loss(
            held,
            f"not restored at {utc_or_unknown(entry.get('at'))}: {entry.get('why')}",
            unrestored=True,
            records=held.last - held.first + 1,
        )
    reason = f"given up by a repair at {utc_or_unknown(entry.get('at'))} ({entry.get('why', 'it is not known why')})"
    kept, records = str(entry.get("kept", "")), entry.get("records")
    reason = f"{reason}; what is left of their bytes is in {kept}" if kept else reason
    return Loss(held, reason, kept=kept, records=records if isinstance(records, int) else held.last - held.first + 1)


def _in_runs(entry: Entry, sequence: int) -> bool:
    try:
        return sequence in Spans(history_runs_of(entry))
    except (KeyError, TypeError, ValueError):
        return True  # the range holds it, and the ledger has nothing more exact


def _held(routes: object) -> tuple[RouteEntry, ...] | None:
    """The routes as a line about a deletion has them, or one about a sealed segment; None if it does not make sense."""
    held = []
    for route in routes if isinstance(routes, list) else [None]:
        match route:
            case {"route": str(name), "count": int(count), "first": int(first), "last": int(last)}:
                held.append(RouteEntry(name, count, first, last))
            case [str(name), int(count), int(first), int(last), *_]:
                held.append(RouteEntry(name, count, first, last))
            case _:
                return None
    return tuple(held)


def _dropped(sequence: int, relief: Entry) -> bool | None:
    """Whether a relief has dropped a record; None: its line does not say."""
    if _held(relief.get("dropped")) is None:
        return None
    around = holders(relief, sequence)
    return any(is_certain for _, is_certain in around) or (None if around else False)


def _among(sequence: int, held: tuple[RouteEntry, ...] | None) -> bool | None:
    """Whether a record is among those that are ``held``; None: not known, because others are between them."""
    around = [each for each in held or () if each.first <= sequence <= each.last]
    if held is None or (around and all(each.count <= each.last - each.first for each in around)):
        return None
    return bool(around)


def _entries(routes: object) -> list[RouteEntry] | None:
    """The routes as a line about a sealed or relieved segment has them; None if it does not make sense."""
    held = []
    for route in routes if isinstance(routes, list) else [None]:
        match route:
            case [str(name), int(count), int(first), int(last), int(payload_bytes)]:
                held.append(RouteEntry(name, count, first, last, payload_bytes))
            case _:
                return None
    return held


def _is_whole(sealed: Entry) -> bool:
    """Whether nothing had been dropped of a segment: a repair writes a line about a relieved one, too."""
    held = _entries(sealed.get("routes"))
    return held is not None and sum(each.count for each in held) == sealed["last"] - sealed["base"] + 1


def _made(entry: Entry) -> int:
    at = entry.get("at")
    return at if isinstance(at, int) else 0
