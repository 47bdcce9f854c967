"""Repair plan: actions, and the records that are lost.

How many records were lost, and whose they were, as far as the ledger or what is left of an index says.

What relief had dropped before the damage is not lost. An index says which records that were; the ledger only counts
those of each route that were left, and its line about a relief is written before that. So it is believed only if
something proves that the relief was carried out; else the records count as lost.

What a repair does, from the facts about a log; nothing is read or changed here.

Oldest first: the segment in which a broken record begins is treated before the one that has lost a piece of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path

from wald.checking.checker import Finding
from wald.errors import Damaged
from wald.files.identity import Identity
from wald.files.listing import Segment
from wald.format.names import segment_name
from wald.format.sealed_index import BadSealed, RouteEntry
from wald.format.spans import Span, Spans
from wald.repairing.survey import LogSurvey, SegmentFacts
from wald.retention.history import History
from wald.segments.sealed_file import SealedFile

Batch = tuple[str, int, int, int]
"""A route; the first sequence of a batch of it, how many records begin in that, and the bytes of its payload."""


def records_lost(spans: Sequence[Span], found: SegmentFacts | None, history: History) -> int:
    """How many records of ``spans`` were there before the damage; no more than that.

    Args:
        found: about the segment that they were in, if it is there.
    """
    total = sum(last - first + 1 for first, last in spans)
    if found is not None and found.dropped is not None:
        dropped = Spans(found.dropped)
        return total - sum(dropped.count(*span) for span in spans)
    try:
        sealed = history.sealed(spans[0][0]) if spans else None
        relieved = found is not None and found.survey is not None and found.survey.relieved
        left = history.remaining_routes(sealed["base"], is_shrunk=relieved) if sealed is not None else None
    except Damaged:
        return total
    if sealed is None or left is None or spans[-1][1] > sealed["last"]:
        return total
    there = 0
    if found is not None:
        if found.survey is None or found.base != sealed["base"]:
            return total
        there = found.survey.kept - sum(first == last and first in found.survey.broken for first, last in spans)
    lost = sum(entry.count for entry in left) - there
    return min(total, lost) if lost >= 0 else total  # it holds more than the ledger says: that is not believed


def routes_lost(span: Span, segment: Segment | None, history: History) -> list[RouteEntry] | None:
    """What of each route the records of ``span`` were; None if it is not known of all.

    Args:
        segment: the one that they were in, if it is there.
    """
    found = _by_index(span, segment) if segment is not None else None
    return found if found is not None else _by_ledger(span, history)


def _by_index(span: Span, segment: Segment) -> list[RouteEntry] | None:
    """By the table of all batches, in an index that can be read."""
    first, last = span
    entries: dict[str, RouteEntry] = {}
    try:
        with SealedFile(segment.path) as sealed:
            table, routes, relieved = sealed.index.batch_table(), sealed.index.routes, sealed.index.shrunk
    except (Damaged, BadSealed, OSError):
        return None
    begun = {number: entry.last for number, entry in enumerate(routes) if not entry.count}  # before the segment
    for base, count, number in zip(table.bases, table.counts, table.routes, strict=True):
        begin, end = max(first, base), min(last, base + count - 1)
        if begin <= end:
            _add(entries, RouteEntry(routes[number].route, end - begin + 1, begin, end, 0))
        elif not count and number in begun and first <= base <= last + 1:  # a piece of a record that began before
            _add(entries, RouteEntry(routes[number].route, 0, begun[number], begun[number], 0))
        if count:
            begun[number] = base + count - 1
    dropped = Spans(relieved.ranges if relieved is not None else ()).count(first, last)
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total + dropped == last - first + 1 else None


def _by_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """By the lines about the sealing of segments all of whose records are lost."""
    entries: dict[str, RouteEntry] = {}
    at = span[0]
    while at <= span[1]:
        try:
            sealed = history.sealed(at)
            held, left = history.sealed_routes(at), history.remaining_routes(at)
        except Damaged:
            return None
        if sealed is None or held is None or left is None or sealed["base"] != at or sealed["last"] > span[1]:
            return None
        if sum(entry.count for entry in held) != sealed["last"] - at + 1:
            return None
        for entry in left:
            _add(entries, entry)
        at = sealed["last"] + 1
    return list(entries.values())


def _add(entries: dict[str, RouteEntry], entry: RouteEntry) -> None:
    """Add the losses of a route. An entry of pieces alone has no records; readers drop a begun record by it."""
    if not entry.count and entry.route in entries:
        return
    if entry.count and entry.route in entries and not entries[entry.route].count:
        del entries[entry.route]
    known = entries.get(entry.route)
    entries[entry.route] = entry if known is None else known.plus(entry)


class ActionKind(Enum):
    """What is done to a file."""

    LEDGER = "ledger"
    """A ledger is begun again, with the lines of the old one that are whole."""
    IDENTITY = "identity"
    """``log.json`` is written again."""
    REMOVE = "remove"
    """What a killed program was making is removed."""
    RENAME = "rename"
    """A segment gets its own name; if that is taken in a ring, one of the ring first gets a name that is free."""
    PUT_BACK = "put back"
    """A damaged segment is replaced by its form from before a relief that was interrupted."""
    SET_ASIDE = "set aside"
    """A file is moved to ``quarantine/``."""
    CLEAR = "clear away"
    """The second form of a segment is moved to ``quarantine/``."""
    REMAKE = "remake"
    """A segment is made again out of what is whole of it."""
    GIVE_UP = "give up"
    """A line of the ledger gives up records that are in no segment."""
    RECORD = "record"
    """The line about a sealed segment is written again."""
    HEAD = "head"
    """The head is written again."""


@dataclass(frozen=True, slots=True)
class Act:
    """One step of a repair.

    Attributes:
        path: the file that it is about.
        reason: what is wrong with that.
        lost: the records that are given up with it.
        lost_records: how many of these there were; relief may have dropped others.
        loses: whether it gives up anything, which has to be accepted.
        facts: about the segment.
        broken: the records that have lost a piece and are left out of it, and their routes.
        identity: what ``log.json`` gets.
        target: the name that a segment gets. No file has it when the act is done.
    """

    deed: ActionKind
    path: Path
    reason: str
    lost: tuple[Span, ...] = ()
    lost_records: int = 0
    loses: bool = False
    facts: SegmentFacts | None = None
    broken: Mapping[int, str] = field(default_factory=dict)
    identity: Identity | None = None
    target: Path | None = None

    @property
    def spanned(self) -> int:
        """How many sequences ``lost`` has."""
        return sum(last - first + 1 for first, last in self.lost)


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        acts: in the order in which they are done.
        left: the errors that no act is about.
        errors: whether ``wald verify`` reports any, of whatever is not a ledger or ``log.json``.
    """

    acts: tuple[Act, ...]
    left: tuple[Finding, ...] = ()
    errors: bool = False

    @property
    def loses(self) -> bool:
        return any(act.loses for act in self.acts)

    @property
    def damage(self) -> bool:
        """Whether ``wald verify`` calls it damage."""
        return self.errors or any(act.deed in (ActionKind.LEDGER, ActionKind.IDENTITY) for act in self.acts)


def plan(facts: LogSurvey) -> Plan:
    """The acts that make the log good."""
    return _Planning(facts).plan()


@dataclass(slots=True)
class _Planning:
    facts: LogSurvey
    kept: list[SegmentFacts] = field(default_factory=list)
    renames: list[Act] = field(default_factory=list)

    def plan(self) -> Plan:
        facts = self.facts
        first = [
            Act(ActionKind.REMOVE, path, "a program was killed while it made this file") for path in facts.leftovers
        ]
        for path in facts.unneeded:
            why = "the form of a segment from before an interrupted relief is damaged"
            first.append(Act(ActionKind.CLEAR, path, why))
        for segment in facts.segments:
            first += self._placed(segment)
        first += in_order(self.renames, {each.segment.path for each in facts.segments})
        for path in facts.put_back:
            why = "it is lost, or damaged, and its form from before an interrupted relief is whole"
            first.append(Act(ActionKind.PUT_BACK, path, why))
        broken = self._broken()
        lost = list(self._lost(broken))
        acts = [act for segment in self.kept if (act := self._treated(segment, broken, lost)) is not None]
        acts += [self._given_up(span) for span in self._ownerless(acts, lost)]
        acts.sort(key=_place)
        records = [
            Act(ActionKind.RECORD, each.segment.path, "no line of the ledger says that it was sealed", facts=each)
            for each in self.kept
            if not each.problem and not each.recorded and each.twin is None
        ]
        left = self._left((*first, *acts))
        return Plan((*first, *acts, *records, *self._head(acts)), left, errors=bool(facts.findings))

    def _placed(self, found: SegmentFacts) -> Iterator[Act]:
        """What is done to a file that is not to be kept; any other is kept, under its own name."""
        due = max((span[1] + 1 for each in self.kept for span in each.spans), default=1)
        path = found.segment.path
        if found.foreign:
            yield Act(ActionKind.SET_ASIDE, path, found.problem, facts=found)
        elif self._best(found) is not found:
            why = f"{found.problem or 'it is a second one'}, and there is one of that name"
            yield Act(ActionKind.SET_ASIDE, path, why, facts=found)
        elif found.base < due and not found.problem and all(last < due for _, last in found.spans):
            yield Act(ActionKind.SET_ASIDE, path, f"its records, up to {due - 1}, are in older segments", facts=found)
        else:
            if found.misnamed:
                target = path.with_name(segment_name(found.base, found.segment.kind))
                self.renames.append(Act(ActionKind.RENAME, path, found.problem, facts=found, target=target))
                problem = found.survey.reason if found.survey is not None else ""
                found = replace(found, segment=Segment(found.base, found.segment.kind, target), problem=problem)
            self.kept.append(found)

    def _best(self, found: SegmentFacts) -> SegmentFacts:
        """Of the files that are the same segment, the one to keep: whole, the longest, under its own name."""
        same = [each for each in self.facts.segments if each.base == found.base and not each.foreign]
        return max(same, key=lambda each: (each.whole, each.whole and each.spans, not each.misnamed))

    def _spans(self, found: SegmentFacts) -> tuple[Span, ...]:
        """Of the records that the segment will give."""
        return found.spans if found.twin_spans is None else found.twin_spans

    def _there(self) -> Spans:
        """Return the records that the segments will hold."""
        return Spans(span for each in self.kept for span in self._spans(each))

    def _broken(self) -> dict[int, str]:
        """The records that have lost a piece, and of which the beginning is there."""
        broken: dict[int, str] = {}
        for each in self.kept:
            if each.survey is not None and each.twin_spans is None:
                broken |= each.survey.broken
            broken |= {sequence: route for route, sequence in each.open_records.items()}
        there = self._there()
        return {sequence: route for sequence, route in broken.items() if sequence in there}

    def _lost(self, broken: Collection[int]) -> Iterator[Span]:
        """The records that are in no segment, and of which no ledger says why; apart by the segments they were in."""
        holes = [*self._there().outside(1, self.facts.last), *((sequence, sequence) for sequence in broken)]
        bases = sorted({each.base for each in self.kept})
        for first, last in sorted(holes):
            for begin, end in self.facts.history.unexplained(first, last):
                inside = sorted({base for base in (*bases, *self._ends(begin, end)) if begin < base <= end})
                for one, other in pairwise([begin, *inside, end + 1]):
                    yield one, other - 1

    def _ends(self, first: int, last: int) -> Iterator[int]:
        """Behind which of the records ``first`` to ``last`` a segment ended, as far as the ledger says."""
        with suppress(Damaged):  # then they are given up as one
            while first <= last and (sealed := self.facts.history.sealed(first)) is not None:
                first = int(sealed["last"]) + 1
                yield first

    def _treated(self, found: SegmentFacts, broken: Mapping[int, str], lost: list[Span]) -> Act | None:
        """What is done to a segment that is in its place; None: nothing."""
        there = Spans(self._spans(found))
        inside = frozenset(sequence for sequence in broken if sequence in there)
        if not found.problem and not inside:
            return None
        if found.twin_spans is not None and not inside:
            return Act(ActionKind.SET_ASIDE, found.segment.path, f"{found.problem}; its raw form is whole", facts=found)
        begin, end = self._extent(found)
        ours = tuple(span for span in lost if begin <= span[0] < end)
        reason = found.problem or f"a piece of record {min(inside, default=0)} is lost"
        records = records_lost(ours, found, self.facts.history)
        guessed = bool(ours) and found.dropped is None  # a count by the ledger alone does not say that nothing is lost
        loses = bool(records or guessed or found.changed or (found.survey is not None and found.survey.broken))
        if found.survey is not None and not (found.survey.spans or found.survey.pieces):
            return Act(ActionKind.SET_ASIDE, found.segment.path, reason, ours, records, loses, found)
        return Act(ActionKind.REMAKE, found.segment.path, reason, ours, records, loses, found, broken)

    def _extent(self, found: SegmentFacts) -> Span:
        """From its base to its end; of a damaged one that the ledger does not list, to the next one."""
        if not found.problem:
            return found.base, max(last + 1 for _, last in found.spans)
        following = [each.base for each in self.kept if each.base > found.base]
        listed = next(self._ends(found.base, found.base), 1 << 64)
        return found.base, min([listed, *following])

    def _ownerless(self, acts: list[Act], lost: list[Span]) -> list[Span]:
        taken = {span for act in acts for span in act.lost}
        return [span for span in lost if span not in taken]

    def _given_up(self, span: Span) -> Act:
        records = records_lost((span,), None, self.facts.history)
        return Act(ActionKind.GIVE_UP, self.facts.root.segments, "no segment holds them", (span,), records, loses=True)

    def _head(self, acts: list[Act]) -> list[Act]:
        """The head stands in a segment that is made again, or cannot be read."""
        facts, head = self.facts, self.facts.head
        treated = {act.facts.base for act in acts if act.facts is not None}
        if head is None and self.kept:
            return [Act(ActionKind.HEAD, facts.root.head, "it is lost, or damaged", loses=False)]
        if head is not None and head.segment in treated:
            loses = any(act.loses for act in acts if act.facts is not None and act.facts.base == head.segment)
            return [Act(ActionKind.HEAD, facts.root.head, "it stands in a segment that is made again", loses=loses)]
        return []

    def _left(self, acts: tuple[Act, ...]) -> tuple[Finding, ...]:
        paths = {act.path for act in acts} | {self.facts.root.head, self.facts.root.segments}
        return tuple(found for found in self.facts.findings if found.path not in paths)


def _place(act: Act) -> int:
    """The sequence by which an act has its place in the order."""
    return act.facts.base if act.facts is not None else act.lost[0][0]


def in_order(renames: list[Act], taken: set[Path]) -> Iterator[Act]:
    """The renames, each to a name that is free by then.

    What is in the way is renamed first. If all are in each other's way, one gets a name that no segment has. A repair
    that is killed then leaves a segment under the name of another one, as it found it.

    Args:
        taken: the names of all segments.
    """
    pending = {act.path: act for act in renames}
    while pending:
        act = next((each for each in pending.values() if each.target not in pending), None)
        if act is None:
            act = next(iter(pending.values()))
            free = _free_name(act, taken)
            pending[free] = replace(act, path=free)
            yield replace(act, target=free, reason=f"{act.reason}; its own name is another one's until that has moved")
        else:
            yield act
        del pending[act.path]


def _free_name(act: Act, taken: set[Path]) -> Path:
    """Close behind the name that it has: a program that lists segments takes the last one for the newest."""
    assert act.facts is not None
    bases = {path.name.partition(".")[0] for path in taken}
    number = next(n for n in itertools.count(act.facts.base + 1) if f"{n:020d}" not in bases)
    return act.path.with_name(segment_name(number, act.facts.segment.kind))
