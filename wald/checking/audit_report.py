"""Deletions in a time span, each judged by its ledger lines.

What the ledgers say happened to a log in a span of time, each deletion judged by the lines about it.

Only the lines of that span are read, and the lines about what was deleted in it. The chain is checked over all that is
read, and between the files of each ledger.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.files.layout import Root
from wald.format.ledger_lines import Entry
from wald.format.names import LEDGERS
from wald.retention.audit import REPEATED, Overlaps, Ruling, audit_deletion, audit_shrink
from wald.retention.history import History

END_OF_TIME_NS = 1 << 63
_DELETIONS = "reclaim.jsonl"
_BESIDE = ("seen", "continues", "excused")


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    Attributes:
        ledger: the file name of its active file; number: of the line in the ledger, from 1.
        ruling: on a deletion that was carried out or is about to be; None for all else.
    """

    at_ns: int
    ledger: str
    number: int
    entry: Entry
    ruling: Ruling | None = None

    @property
    def is_beside(self) -> bool:
        """Whether it says nothing that happened to records, or other lines do."""
        return self.entry.get("event") in _BESIDE

    @property
    def is_deletion(self) -> bool:
        """Whether a segment was deleted, or is about to be."""
        held = isinstance(self.entry.get("base"), int) and isinstance(self.entry.get("last"), int)
        return held and self.ledger == _DELETIONS and self.entry.get("event") == "reclaimed"

    @property
    def routes(self) -> set[str]:
        """Whose records it is about; empty if it does not say."""
        held = [*(self.entry.get("routes") or ()), *(self.entry.get("dropped") or ())]
        named = [each.get("route") if isinstance(each, dict) else each[:1] for each in held if each]
        names = {str(each[0] if isinstance(each, list) else each) for each in named}
        return names | ({str(self.entry["route"])} if "route" in self.entry else set())


class DeletionAudit:
    """The lines from ``from_ns`` ≤ t < ``until_ns`` of all ledgers of a root.

    Attributes:
        root: of the log.
        lines: how many have been read; illegal: how many deletions were not legal.
        broken: what cannot be believed, a message each: the lines of that ledger end where it begins.
    """

    def __init__(self, root: Root, *, from_ns: int = 0, until_ns: int = END_OF_TIME_NS) -> None:
        self.root = root
        self._from_ns = from_ns
        self._until_ns = until_ns
        self._history = History(root)
        self._overlaps = Overlaps()
        self._taken_back: dict[int, int] = {}
        self.lines = self.illegal = 0
        self.broken: list[str] = []

    def events(self) -> Iterator[Event]:
        """Every line that says what happened, in the order of time as far as each ledger is."""
        for event in self._of(_DELETIONS, END_OF_TIME_NS):
            if event.entry.get("event") == "kept" and isinstance(base := event.entry.get("base"), int):
                self._taken_back[base] = event.number
        self.lines, self.broken = 0, []
        ledgers = [self._of(name, self._until_ns) for name in LEDGERS]
        for event in heapq.merge(*ledgers, key=lambda event: event.at_ns):
            self.lines += 1
            if not event.is_beside:
                yield self._next(event)

    def newest_first(self, before: Mapping[str, int]) -> Iterator[Event]:
        """Every line from the newest on back, by the time as far as each ledger is, whenever it was written.

        No deletion is judged yet: :meth:`judged` does that. So who stops early has read little.

        Args:
            before: of some ledgers, the number of the line in front of which to begin.
        """
        ledgers = [self._back(name, before.get(name)) for name in LEDGERS]
        yield from heapq.merge(*ledgers, key=lambda event: -event.at_ns)

    def judged(self, event: Event) -> Event:
        """An event of :meth:`newest_first`, and if it is a deletion, its ruling; found by look-ups in the ledgers."""
        event = self._completed(event)
        try:
            if event.is_deletion and self._history.is_withdrawn(event.entry["base"], event.number):
                return event
            event = self._judged(event)
            repeated = event.is_deletion and self._history.is_repeated(event.entry, event.number)
            if repeated and event.ruling is not None:
                return replace(event, ruling=replace(event.ruling, errors=(*event.ruling.errors, REPEATED)))
        except Damaged as error:
            self._report(error)
        return event

    def _next(self, event: Event) -> Event:
        """Judged by the lines of the span, which come in order."""
        event = self._completed(event)
        if event.is_deletion and self._taken_back.get(event.entry["base"], 0) > event.number:
            return event
        event = self._judged(event)
        if event.is_deletion and event.ruling is not None:
            event = replace(event, ruling=self._overlaps.check(event.entry, event.ruling))
        self.illegal += event.ruling is not None and bool(event.ruling.errors)
        return event

    def _back(self, name: str, before: int | None) -> Iterator[Event]:
        try:
            for line in self._history.ledgers[name].newest_first(before):
                if isinstance(at := line.entry.get("at"), int):
                    yield Event(at, name, line.number, line.entry)
        except Damaged as error:
            self._report(error)

    def _of(self, name: str, until_ns: int) -> Iterator[Event]:
        try:
            for line in self._history.ledgers[name].written(self._from_ns, until_ns):
                yield Event(line.entry["at"], name, line.number, line.entry)
        except Damaged as error:
            self.broken.append(error.message)

    def _judged(self, event: Event) -> Event:
        """With a ruling, if it is a deletion or a relief."""
        entry = event.entry
        match entry:
            case {"base": int(base), "last": int()} if event.is_deletion:
                return replace(event, ruling=audit_deletion(entry, self._made_by(base, entry.get("sha256"))))
            case {"event": "relieved", "base": int(base), "last": int()} if event.ledger == _DELETIONS:
                return replace(event, ruling=audit_shrink(entry, self._made_by(base, entry.get("was_sha256"))))
        return event

    def _completed(self, event: Event) -> Event:
        """With its routes, if they are in other lines; as it stands where the ledgers do not give them."""
        if event.ledger == _DELETIONS:
            with suppress(Damaged):  # the reading of that ledger reports it
                return replace(event, entry=self._history.with_routes(event.entry))
        return event

    def _made_by(self, base: int, sha256: object) -> Entry | None:
        """The line that says what a segment held when it had this digest; None if no whole ledger has it."""
        try:
            return self._history.line_for_digest(base, sha256)
        except Damaged as error:
            self._report(error)
            return None

    def _report(self, error: Damaged) -> None:
        if error.message not in self.broken:
            self.broken.append(error.message)
