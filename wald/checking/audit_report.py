"""Events of a log in a time span, read from its ledgers, with an audit of each deletion.

It reads only the lines of that span, and those about segments deleted in it. It checks the chain over all these lines,
and from file to file.
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
from wald.format.spans import Spans
from wald.retention.audit import REPEATED, Ruling, audit_deletion, audit_shrink
from wald.retention.history import History

END_OF_TIME_NS = 1 << 63
_DELETIONS = "reclaim.jsonl"
_NO_EVENTS = ("seen", "continues", "evidence")  # other lines report what happened


@dataclass(frozen=True, slots=True)
class Event:
    """One ledger line.

    Attributes:
        number: number of the line in the ledger, starting at 1.
        ruling: audit of a deletion, done or about to be done; None for other lines.
    """

    at_ns: int
    ledger: str
    number: int
    entry: Entry
    ruling: Ruling | None = None

    @property
    def is_event(self) -> bool:
        return self.entry.get("event") not in _NO_EVENTS

    @property
    def is_deletion(self) -> bool:
        held = isinstance(self.entry.get("base"), int) and isinstance(self.entry.get("last"), int)
        return held and self.ledger == _DELETIONS and self.entry.get("event") == "reclaimed"

    @property
    def routes(self) -> set[str]:
        """Routes whose records the line is about; empty if it names none."""
        held = [*(self.entry.get("routes") or ()), *(self.entry.get("dropped") or ())]
        named = [each.get("route") if isinstance(each, dict) else each[:1] for each in held if each]
        names = {str(each[0] if isinstance(each, list) else each) for each in named}
        return names | ({str(self.entry["route"])} if "route" in self.entry else set())


class DeletionAudit:
    """Ledger lines of a root in the time span ``from_ns`` ≤ t < ``until_ns``, with rulings on deletions.

    Attributes:
        lines: number of lines read.
        not_allowed: deletions that were not allowed.
        broken: a message for each damaged ledger; its lines end where the damage begins.
    """

    def __init__(self, root: Root, *, from_ns: int = 0, until_ns: int = END_OF_TIME_NS) -> None:
        self.root = root
        self._from_ns = from_ns
        self._until_ns = until_ns
        self._history = History(root)
        self._deleted = Spans()
        self._undone: dict[int, int] = {}  # base → number of the last line that undid its deletion
        self.lines = self.not_allowed = 0
        self.broken: list[str] = []

    def events(self) -> Iterator[Event]:
        """Merge the events of all ledgers by time."""
        for event in self._read(_DELETIONS, END_OF_TIME_NS):
            if event.entry.get("event") == "kept" and isinstance(base := event.entry.get("base"), int):
                self._undone[base] = event.number
        self.lines, self.broken = 0, []
        ledgers = [self._read(name, self._until_ns) for name in LEDGERS]
        for event in heapq.merge(*ledgers, key=lambda event: event.at_ns):
            self.lines += 1
            if event.is_event:
                yield self._next(event)

    def newest_first(self, before: Mapping[str, int]) -> Iterator[Event]:
        """Yield all lines of all ledgers from the newest backwards, without rulings: see :meth:`judged`.

        Args:
            before: ledger → number of the line before which to begin.
        """
        ledgers = [self._read_backwards(name, before.get(name)) for name in LEDGERS]
        yield from heapq.merge(*ledgers, key=lambda event: -event.at_ns)

    def judged(self, event: Event) -> Event:
        """Return an event of :meth:`newest_first` with the ruling on its deletion, by look-ups in the ledgers."""
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
        event = self._completed(event)
        if event.is_deletion and self._undone.get(event.entry["base"], 0) > event.number:
            return event
        event = self._judged(event, self._deleted)
        self.not_allowed += event.ruling is not None and bool(event.ruling.errors)
        return event

    def _read_backwards(self, name: str, before: int | None) -> Iterator[Event]:
        try:
            for line in self._history.ledgers[name].newest_first(before):
                if isinstance(at := line.entry.get("at"), int):
                    yield Event(at, name, line.number, line.entry)
        except Damaged as error:
            self._report(error)

    def _read(self, name: str, until_ns: int) -> Iterator[Event]:
        try:
            for line in self._history.ledgers[name].written(self._from_ns, until_ns):
                yield Event(line.entry["at"], name, line.number, line.entry)
        except Damaged as error:
            self.broken.append(error.message)

    def _judged(self, event: Event, deleted: Spans | None = None) -> Event:
        entry = event.entry
        match entry:
            case {"base": int(base), "last": int()} if event.is_deletion:
                sealed = self._sealing_line(base, entry.get("sha256"))
                return replace(event, ruling=audit_deletion(entry, sealed, deleted=deleted))
            case {"event": "shrunk", "base": int(base), "last": int()} if event.ledger == _DELETIONS:
                return replace(event, ruling=audit_shrink(entry, self._sealing_line(base, entry.get("was_sha256"))))
        return event

    def _completed(self, event: Event) -> Event:
        """Return the event with routes that another line lists; unchanged if the ledgers lack that line."""
        if event.ledger == _DELETIONS:
            with suppress(Damaged):  # reported when that ledger is read
                return replace(event, entry=self._history.with_routes(event.entry))
        return event

    def _sealing_line(self, base: int, sha256: object) -> Entry | None:
        """Return the line that lists the contents of a segment with this digest; None if no intact ledger has it."""
        try:
            return self._history.line_for_digest(base, sha256)
        except Damaged as error:
            self._report(error)
            return None

    def _report(self, error: Damaged) -> None:
        if error.message not in self.broken:
            self.broken.append(error.message)
