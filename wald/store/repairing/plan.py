"""What a repair does, from the facts about a log; nothing is read or changed here.

Oldest first: the segment in which a broken record begins is treated before the one that has lost a piece of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count, pairwise
from pathlib import Path

from wald.errors import Damaged
from wald.format.names import segment_name
from wald.format.spans import Span, Spans
from wald.store.checking.finding import Finding
from wald.store.files.identity import Identity
from wald.store.files.listing import Segment
from wald.store.repairing.facts import Facts, SegmentFacts
from wald.store.repairing.loss import records_lost


class Deed(Enum):
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

    deed: Deed
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
        return self.errors or any(act.deed in (Deed.LEDGER, Deed.IDENTITY) for act in self.acts)


def plan(facts: Facts) -> Plan:
    """The acts that make the log good."""
    return _Planning(facts).plan()


@dataclass(slots=True)
class _Planning:
    facts: Facts
    kept: list[SegmentFacts] = field(default_factory=list)
    renames: list[Act] = field(default_factory=list)

    def plan(self) -> Plan:
        facts = self.facts
        first = [Act(Deed.REMOVE, path, "a program was killed while it made this file") for path in facts.leftovers]
        for path in facts.unneeded:
            why = "the form of a segment from before an interrupted relief is damaged"
            first.append(Act(Deed.CLEAR, path, why))
        for segment in facts.segments:
            first += self._placed(segment)
        first += in_order(self.renames, {each.segment.path for each in facts.segments})
        for path in facts.put_back:
            why = "it is lost, or damaged, and its form from before an interrupted relief is whole"
            first.append(Act(Deed.PUT_BACK, path, why))
        broken = self._broken()
        lost = list(self._lost(broken))
        acts = [act for segment in self.kept if (act := self._treated(segment, broken, lost)) is not None]
        acts += [self._given_up(span) for span in self._ownerless(acts, lost)]
        acts.sort(key=_place)
        records = [
            Act(Deed.RECORD, each.segment.path, "no line of the ledger says that it was sealed", facts=each)
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
            yield Act(Deed.SET_ASIDE, path, found.problem, facts=found)
        elif self._best(found) is not found:
            why = f"{found.problem or 'it is a second one'}, and there is one of that name"
            yield Act(Deed.SET_ASIDE, path, why, facts=found)
        elif found.base < due and not found.problem and all(last < due for _, last in found.spans):
            yield Act(Deed.SET_ASIDE, path, f"its records, up to {due - 1}, are in older segments", facts=found)
        else:
            if found.misnamed:
                target = path.with_name(segment_name(found.base, found.segment.kind))
                self.renames.append(Act(Deed.RENAME, path, found.problem, facts=found, target=target))
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
            return Act(Deed.SET_ASIDE, found.segment.path, f"{found.problem}; its raw form is whole", facts=found)
        begin, end = self._extent(found)
        ours = tuple(span for span in lost if begin <= span[0] < end)
        reason = found.problem or f"a piece of record {min(inside, default=0)} is lost"
        records = records_lost(ours, found, self.facts.history)
        guessed = bool(ours) and found.dropped is None  # a count by the ledger alone does not say that nothing is lost
        loses = bool(records or guessed or found.changed or (found.survey is not None and found.survey.broken))
        if found.survey is not None and not (found.survey.spans or found.survey.pieces):
            return Act(Deed.SET_ASIDE, found.segment.path, reason, ours, records, loses, found)
        return Act(Deed.REMAKE, found.segment.path, reason, ours, records, loses, found, broken)

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
        return Act(Deed.GIVE_UP, self.facts.root.segments, "no segment holds them", (span,), records, loses=True)

    def _head(self, acts: list[Act]) -> list[Act]:
        """The head stands in a segment that is made again, or cannot be read."""
        facts, head = self.facts, self.facts.head
        treated = {act.facts.base for act in acts if act.facts is not None}
        if head is None and self.kept:
            return [Act(Deed.HEAD, facts.root.head, "it is lost, or damaged", loses=False)]
        if head is not None and head.segment in treated:
            loses = any(act.loses for act in acts if act.facts is not None and act.facts.base == head.segment)
            return [Act(Deed.HEAD, facts.root.head, "it stands in a segment that is made again", loses=loses)]
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
    number = next(n for n in count(act.facts.base + 1) if f"{n:020d}" not in bases)
    return act.path.with_name(segment_name(number, act.facts.segment.kind))
