"""What the ledgers say happened to a log in a span of time, each deletion judged by the lines about it.

Only the lines of that span are read, and the lines about what was deleted in it. The chain is checked over all that is
read, and between the files of each ledger.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.format.names import LEDGERS
from wald.store.files.directory import Root
from wald.store.files.lines import Entry
from wald.store.retention.history import History
from wald.store.retention.legality import Overlaps, Ruling, judge, judge_relief

END_OF_TIME_NS = 1 << 63
_BESIDE = ("seen", "continues", "excused")  # they say nothing that happened to records, or other lines do


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
    def routes(self) -> set[str]:
        """Whose records it is about; empty if it does not say."""
        held = [*(self.entry.get("routes") or ()), *(self.entry.get("dropped") or ())]
        named = [each.get("route") if isinstance(each, dict) else each[:1] for each in held if each]
        names = {str(each[0] if isinstance(each, list) else each) for each in named}
        return names | ({str(self.entry["route"])} if "route" in self.entry else set())


class Story:
    """The lines from ``from_ns`` ≤ t < ``until_ns`` of all ledgers of a root.

    Attributes:
        lines: how many have been read; illegal: how many deletions were not legal.
        broken: what cannot be believed, a message each: the lines of that ledger end where it begins.
    """

    def __init__(self, root: Root, *, from_ns: int = 0, until_ns: int = END_OF_TIME_NS) -> None:
        self._from_ns = from_ns
        self._until_ns = until_ns
        self._history = History(root)
        self._overlaps = Overlaps()
        self._taken_back: dict[int, int] = {}
        self.lines = self.illegal = 0
        self.broken: list[str] = []

    def events(self) -> Iterator[Event]:
        """Every line that says what happened, in the order of time as far as each ledger is."""
        for event in self._of("reclaim.jsonl", END_OF_TIME_NS):
            if event.entry.get("event") == "kept" and isinstance(base := event.entry.get("base"), int):
                self._taken_back[base] = event.number
        self.lines, self.broken = 0, []
        ledgers = [self._of(name, self._until_ns) for name in LEDGERS]
        for event in heapq.merge(*ledgers, key=lambda event: event.at_ns):
            self.lines += 1
            if event.entry.get("event") not in _BESIDE:
                yield self._judged(event)

    def _of(self, name: str, until_ns: int) -> Iterator[Event]:
        try:
            for line in self._history.ledgers[name].written(self._from_ns, until_ns):
                yield Event(line.entry["at"], name, line.number, line.entry)
        except Damaged as error:
            self.broken.append(error.message)

    def _judged(self, event: Event) -> Event:
        entry = event.entry
        if event.ledger == "reclaim.jsonl":
            entry = self._completed(entry)
            event = replace(event, entry=entry)
        match entry:
            case {"event": "reclaimed", "base": int(base), "last": int()} if event.ledger == "reclaim.jsonl":
                if self._taken_back.get(base, 0) > event.number:
                    return event
                ruling = self._overlaps.check(entry, judge(entry, self._made_by(base, entry.get("sha256"))))
            case {"event": "relieved", "base": int(base), "last": int()} if event.ledger == "reclaim.jsonl":
                ruling = judge_relief(entry, self._made_by(base, entry.get("was_sha256")))
            case _:
                return event
        self.illegal += bool(ruling.errors)
        return replace(event, ruling=ruling)

    def _completed(self, entry: Entry) -> Entry:
        """The line with its routes; as it stands where the ledgers do not give them."""
        with suppress(Damaged):  # the reading of that ledger reports it
            return self._history.completed(entry)
        return entry

    def _made_by(self, base: int, sha256: object) -> Entry | None:
        """The line that says what a segment held when it had this digest; None if no whole ledger has it."""
        try:
            return self._history.made_by(base, sha256)
        except Damaged as error:
            if error.message not in self.broken:
                self.broken.append(error.message)
            return None
