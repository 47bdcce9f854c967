"""Events of a log in a time span, read from its ledgers, with an audit of each deletion.

The audit reads only ledger lines of the span, and about segments deleted in it. It checks the hash chain across these
lines, and from file to file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLine
from wald.format.ledger_lines import Entry
from wald.format.spans import Spans
from wald.retention.audit import REPEATED, Ruling, audit_deletion, audit_shrink
from wald.retention.history import History

END_OF_TIME_NS = 1 << 63
_DELETIONS = "reclaim.jsonl"
_NOT_EVENTS = ("seen", "continues", "evidence")


@dataclass(frozen=True, slots=True)
class Event:
    """Ledger line; a deletion or shrink has a ruling."""

    at_ns: int
    ledger: str
    number: int  # of the line, starting with 1
    entry: Entry
    ruling: Ruling | None = None

    @property
    def is_event(self) -> bool:
        return self.entry.get("event") not in _NOT_EVENTS

    def is_range(self, name: str) -> bool:
        has_range = isinstance(self.entry.get("base"), int) and isinstance(self.entry.get("last"), int)
        return has_range and self.ledger == _DELETIONS and self.entry.get("event") == name

    @property
    def routes(self) -> set[str]:
        """Routes that the line names."""
        items = [*(self.entry.get("routes") or ()), *(self.entry.get("dropped") or ())]
        names = {str(each.get("route") if isinstance(each, dict) else each[0]) for each in items if each}
        return names | ({str(self.entry["route"])} if "route" in self.entry else set())


class DeletionAudit:
    """Audit of the time span ``from_ns`` ≤ t < ``until_ns`` of a root."""

    def __init__(self, root: Root, *, from_ns: int = 0, until_ns: int = END_OF_TIME_NS) -> None:
        self.root = root
        self._from_ns = from_ns
        self._until_ns = until_ns
        self._history = History(root)
        self._deleted = Spans()
        self.lines = 0  # lines read
        self.not_allowed = 0  # deletions
        self.broken: list[str] = []  # a message for each damaged ledger; lines after the damage are not read

    def events(self) -> Iterator[Event]:
        """Yield the events of all ledgers, oldest first, with rulings."""
        deletions = self._history.ledgers[_DELETIONS].written_between(self._from_ns, END_OF_TIME_NS)
        withdrawn = {  # base → number of the last line that withdrew its deletion
            event.entry.get("base"): event.number
            for event in self._events(_DELETIONS, deletions)
            if event.entry.get("event") == "kept"
        }
        self.lines, self.broken = 0, []
        ledgers = self._history.ledgers.items()
        events = (self._events(name, lines.written_between(self._from_ns, self._until_ns)) for name, lines in ledgers)
        for line in heapq.merge(*events, key=lambda event: event.at_ns):
            self.lines += 1
            if not line.is_event:
                continue
            event = self._with_routes(line)
            if not event.is_range("reclaimed") or withdrawn.get(event.entry["base"], 0) <= event.number:
                ruling = self._audit(event, self._deleted)
                self.not_allowed += ruling is not None and bool(ruling.errors)
                event = replace(event, ruling=ruling)
            yield event

    def newest_first(self, before: Mapping[str, int]) -> Iterator[Event]:
        """Yield all lines, newest first, without rulings (see :meth:`with_ruling`).

        ``before`` maps ledgers to the line numbers before which to start.
        """
        ledgers = self._history.ledgers.items()
        events = (self._events(name, lines.newest_first(before.get(name))) for name, lines in ledgers)
        yield from heapq.merge(*events, key=lambda event: -event.at_ns)

    def with_ruling(self, event: Event) -> Event:
        """Add the ruling to an event of :meth:`newest_first`, by look-ups in the ledgers."""
        event = self._with_routes(event)
        is_deletion = event.is_range("reclaimed")
        try:
            if is_deletion and self._history.is_withdrawn(event.entry["base"], event.number):
                return event
            ruling = self._audit(event)
            event = replace(event, ruling=ruling)
            if ruling is not None and is_deletion and self._history.is_repeated(event.entry, event.number):
                return replace(event, ruling=replace(ruling, errors=(*ruling.errors, REPEATED)))
        except Damaged as error:
            self._report(error)
        return event

    def _events(self, ledger: str, lines: Iterator[LedgerLine]) -> Iterator[Event]:
        try:
            for line in lines:
                if isinstance(at := line.entry.get("at"), int):
                    yield Event(at, ledger, line.number, line.entry)
        except Damaged as error:
            self._report(error)

    def _with_routes(self, event: Event) -> Event:
        """Add routes that another line lists for the event, unless that line is lost."""
        if event.ledger == _DELETIONS:
            with suppress(Damaged):  # reported when that ledger is read
                return replace(event, entry=self._history.with_routes(event.entry))
        return event

    def _audit(self, event: Event, deleted: Spans | None = None) -> Ruling | None:
        entry, is_deletion = event.entry, event.is_range("reclaimed")
        if not is_deletion and not event.is_range("shrunk"):
            return None
        before = None  # the line that lists the contents of the former file
        try:
            before = self._history.line_for_digest(entry["base"], entry.get("sha256" if is_deletion else "was_sha256"))
        except Damaged as error:
            self._report(error)
        return audit_deletion(entry, before, deleted=deleted) if is_deletion else audit_shrink(entry, before)

    def _report(self, error: Damaged) -> None:
        if error.message not in self.broken:
            self.broken.append(error.message)
