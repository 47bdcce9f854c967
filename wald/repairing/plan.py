"""Repair plan: the actions that repair a log, and the records that are lost.

The plan changes nothing. Segments are handled oldest first, so that the segment in which a broken record begins comes
before the one that has lost a piece of it.

Records that shrinking dropped before the damage are not lost. The index lists them. The ledger only counts the records
that remain, in a line that is written before the segment shrinks, so it counts only with proof that the segment shrank.
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
"""Route, first sequence, number of records that begin in the batch, bytes of its payload."""


def records_lost(spans: Sequence[Span], found: SegmentFacts | None, history: History) -> int:
    """Return the number of records in ``spans`` that existed before the damage, at most.

    Args:
        found: facts about their segment, if it exists.
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
    return min(total, lost) if lost >= 0 else total  # more than the ledger lists, so its count is wrong


def routes_lost(span: Span, segment: Segment | None, history: History) -> list[RouteEntry] | None:
    """Return the records of ``span`` by route; None if any of them is unknown.

    Args:
        segment: the segment that had them, if it exists.
    """
    found = _by_index(span, segment) if segment is not None else None
    return found if found is not None else _by_ledger(span, history)


def _by_index(span: Span, segment: Segment) -> list[RouteEntry] | None:
    """Return the records by route from a readable batch table."""
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
        elif not count and number in begun and first <= base <= last + 1:  # a piece of an earlier record
            _add(entries, RouteEntry(routes[number].route, 0, begun[number], begun[number], 0))
        if count:
            begun[number] = base + count - 1
    dropped = Spans(relieved.ranges if relieved is not None else ()).count(first, last)
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total + dropped == last - first + 1 else None


def _by_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """Return the records by route from ledger lines, if whole segments are lost."""
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
    """Add the losses of a route. An entry without records is for pieces: it makes readers drop an unfinished record."""
    if not entry.count and entry.route in entries:
        return
    if entry.count and entry.route in entries and not entries[entry.route].count:
        del entries[entry.route]
    known = entries.get(entry.route)
    entries[entry.route] = entry if known is None else known.plus(entry)


class ActionKind(Enum):
    """Kind of a repair action."""

    LEDGER = "ledger"
    """Rebuild a ledger from the intact lines of the old one."""
    IDENTITY = "identity"
    """Rewrite ``log.json``."""
    REMOVE = "remove"
    """Remove the temporary file of a killed program."""
    RENAME = "rename"
    """Give a segment its own name; in a ring of swapped names, one segment first gets a free name."""
    PUT_BACK = "put back"
    """Replace a damaged segment by its original from before an interrupted shrinking."""
    SET_ASIDE = "set aside"
    """Move a file to ``quarantine/``."""
    CLEAR = "clear away"
    """Move the second form of a segment to ``quarantine/``."""
    REMAKE = "remake"
    """Rewrite a segment from its intact batches."""
    GIVE_UP = "give up"
    """Record in the ledger that records are in no segment and lost."""
    RECORD = "record"
    """Rewrite the ledger line about a sealed segment."""
    HEAD = "head"
    """Rewrite the head."""


@dataclass(frozen=True, slots=True)
class Act:
    """One step of a repair.

    Attributes:
        path: file that is repaired.
        reason: problem of that file.
        lost: sequences that are given up.
        lost_records: number of records among them; shrinking may have dropped the others.
        loses: the step gives up data, which the operator must accept.
        facts: facts about the segment.
        broken: record → route of the records that have lost a piece and are dropped.
        identity: new contents of ``log.json``.
        target: new name of a segment, free when the step runs.
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
        """Return the number of sequences in ``lost``."""
        return sum(last - first + 1 for first, last in self.lost)


@dataclass(frozen=True, slots=True)
class Plan:
    """Repair steps in order.

    Attributes:
        left: errors that no step repairs.
        errors: ``wald verify`` reports errors outside the ledgers and ``log.json``.
    """

    acts: tuple[Act, ...]
    left: tuple[Finding, ...] = ()
    errors: bool = False

    @property
    def loses(self) -> bool:
        return any(act.loses for act in self.acts)

    @property
    def damage(self) -> bool:
        """True if ``wald verify`` reports damage."""
        return self.errors or any(act.deed in (ActionKind.LEDGER, ActionKind.IDENTITY) for act in self.acts)


def plan(facts: LogSurvey) -> Plan:
    """Return the steps that repair the log."""
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
            why = "the original of a segment whose shrinking was interrupted is damaged"
            first.append(Act(ActionKind.CLEAR, path, why))
        for segment in facts.segments:
            first += self._placed(segment)
        first += in_order(self.renames, {each.segment.path for each in facts.segments})
        for path in facts.put_back:
            why = "it is lost or damaged, and its original from before an interrupted shrinking is intact"
            first.append(Act(ActionKind.PUT_BACK, path, why))
        broken = self._broken()
        lost = list(self._lost(broken))
        acts = [act for segment in self.kept if (act := self._treated(segment, broken, lost)) is not None]
        acts += [self._given_up(span) for span in self._ownerless(acts, lost)]
        acts.sort(key=_place)
        records = [
            Act(ActionKind.RECORD, each.segment.path, "the ledger has no line about its sealing", facts=each)
            for each in self.kept
            if not each.problem and not each.recorded and each.twin is None
        ]
        left = self._left((*first, *acts))
        return Plan((*first, *acts, *records, *self._head(acts)), left, errors=bool(facts.findings))

    def _placed(self, found: SegmentFacts) -> Iterator[Act]:
        """Yield the step for a file that is set aside; add any other to ``kept`` under its own name."""
        due = max((span[1] + 1 for each in self.kept for span in each.spans), default=1)
        path = found.segment.path
        if found.foreign:
            yield Act(ActionKind.SET_ASIDE, path, found.problem, facts=found)
        elif self._best(found) is not found:
            why = f"{found.problem or 'it is a duplicate'}, and another file is that segment"
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
        """Return the file to keep among those of the same segment: intact, longest, correctly named."""
        same = [each for each in self.facts.segments if each.base == found.base and not each.foreign]
        return max(same, key=lambda each: (each.whole, each.whole and each.spans, not each.misnamed))

    def _spans(self, found: SegmentFacts) -> tuple[Span, ...]:
        """Return the sequences that the segment will contain."""
        return found.spans if found.twin_spans is None else found.twin_spans

    def _there(self) -> Spans:
        """Return the sequences that all segments will contain."""
        return Spans(span for each in self.kept for span in self._spans(each))

    def _broken(self) -> dict[int, str]:
        """Return the records that have lost a piece but not their beginning, with their routes."""
        broken: dict[int, str] = {}
        for each in self.kept:
            if each.survey is not None and each.twin_spans is None:
                broken |= each.survey.broken
            broken |= {sequence: route for route, sequence in each.open_records.items()}
        there = self._there()
        return {sequence: route for sequence, route in broken.items() if sequence in there}

    def _lost(self, broken: Collection[int]) -> Iterator[Span]:
        """Yield the unexplained missing sequences, split at the bounds of the segments that had them."""
        holes = [*self._there().outside(1, self.facts.last), *((sequence, sequence) for sequence in broken)]
        bases = sorted({each.base for each in self.kept})
        for first, last in sorted(holes):
            for begin, end in self.facts.history.unexplained(first, last):
                inside = sorted({base for base in (*bases, *self._ends(begin, end)) if begin < base <= end})
                for one, other in pairwise([begin, *inside, end + 1]):
                    yield one, other - 1

    def _ends(self, first: int, last: int) -> Iterator[int]:
        """Yield the segment bounds between ``first`` and ``last`` that the ledger lists."""
        with suppress(Damaged):  # then they are given up as one range
            while first <= last and (sealed := self.facts.history.sealed(first)) is not None:
                first = int(sealed["last"]) + 1
                yield first

    def _treated(self, found: SegmentFacts, broken: Mapping[int, str], lost: list[Span]) -> Act | None:
        """Return the step for a correctly named segment, or None."""
        there = Spans(self._spans(found))
        inside = frozenset(sequence for sequence in broken if sequence in there)
        if not found.problem and not inside:
            return None
        if found.twin_spans is not None and not inside:
            return Act(
                ActionKind.SET_ASIDE, found.segment.path, f"{found.problem}; its raw form is intact", facts=found
            )
        begin, end = self._extent(found)
        ours = tuple(span for span in lost if begin <= span[0] < end)
        reason = found.problem or f"a piece of record {min(inside, default=0)} is lost"
        records = records_lost(ours, found, self.facts.history)
        guessed = (
            bool(ours) and found.dropped is None
        )  # a count from the ledger alone does not prove that nothing is lost
        loses = bool(records or guessed or found.changed or (found.survey is not None and found.survey.broken))
        if found.survey is not None and not (found.survey.spans or found.survey.pieces):
            return Act(ActionKind.SET_ASIDE, found.segment.path, reason, ours, records, loses, found)
        return Act(ActionKind.REMAKE, found.segment.path, reason, ours, records, loses, found, broken)

    def _extent(self, found: SegmentFacts) -> Span:
        """Return the base and the end of a segment; a damaged one without a ledger line ends at the next segment."""
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
        return Act(ActionKind.GIVE_UP, self.facts.root.segments, "no segment has them", (span,), records, loses=True)

    def _head(self, acts: list[Act]) -> list[Act]:
        """Return the step for a head that is unreadable or in a rewritten segment."""
        facts, head = self.facts, self.facts.head
        treated = {act.facts.base for act in acts if act.facts is not None}
        if head is None and self.kept:
            return [Act(ActionKind.HEAD, facts.root.head, "it is lost or damaged", loses=False)]
        if head is not None and head.segment in treated:
            loses = any(act.loses for act in acts if act.facts is not None and act.facts.base == head.segment)
            return [Act(ActionKind.HEAD, facts.root.head, "it is in a segment that is rewritten", loses=loses)]
        return []

    def _left(self, acts: tuple[Act, ...]) -> tuple[Finding, ...]:
        paths = {act.path for act in acts} | {self.facts.root.head, self.facts.root.segments}
        return tuple(found for found in self.facts.findings if found.path not in paths)


def _place(act: Act) -> int:
    """Return the sequence by which steps are ordered."""
    return act.facts.base if act.facts is not None else act.lost[0][0]


def in_order(renames: list[Act], taken: set[Path]) -> Iterator[Act]:
    """Yield renames in an order in which each target is free.

    In a ring of swapped names, one segment first gets a name that no segment has. A repair that is killed then leaves
    a misnamed segment, which the next repair handles.

    Args:
        taken: names of all segments.
    """
    pending = {act.path: act for act in renames}
    while pending:
        act = next((each for each in pending.values() if each.target not in pending), None)
        if act is None:
            act = next(iter(pending.values()))
            free = _free_name(act, taken)
            pending[free] = replace(act, path=free)
            yield replace(act, target=free, reason=f"{act.reason}; another segment has its name until that is renamed")
        else:
            yield act
        del pending[act.path]


def _free_name(act: Act, taken: set[Path]) -> Path:
    """Return a free name just after the current one: the last name in a listing counts as the newest segment."""
    assert act.facts is not None
    bases = {path.name.partition(".")[0] for path in taken}
    number = next(n for n in itertools.count(act.facts.base + 1) if f"{n:020d}" not in bases)
    return act.path.with_name(segment_name(number, act.facts.segment.kind))
