"""Repair plan: the actions that repair a log, and the records that are lost. It changes nothing.

Segments are handled oldest first: the one in which a broken record begins comes before one that lost a piece of it.

Records that shrinking dropped before the damage are not lost. The index lists them. The ledger only counts the others,
in a line written before the segment shrinks, so it needs proof that the segment did shrink.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from wald.errors import Damaged
from wald.files.identity import Identity
from wald.files.listing import Segment
from wald.format.names import segment_name
from wald.format.sealed_index import BadSealed, RouteEntry, SealedIndex
from wald.format.spans import Span, Spans
from wald.repairing.survey import LogSurvey, SegmentFacts
from wald.retention.history import History
from wald.segments.sealed_file import SealedFile


def records_lost(spans: Sequence[Span], found: SegmentFacts | None, history: History) -> int:
    """Return an upper limit of the records lost in ``spans``. ``found`` is their segment, if it exists."""
    total = _length(spans)
    if found is not None and found.dropped is not None:
        dropped = Spans(found.dropped)
        return total - sum(dropped.count(*span) for span in spans)
    rescued = None if found is None else found.rescued
    try:
        sealed = history.sealing_of(spans[0][0]) if spans else None
        is_shrunk = rescued is not None and rescued.shrunk
        left = history.remaining_routes(sealed["base"], is_shrunk=is_shrunk) if sealed is not None else None
    except Damaged:
        return total
    if sealed is None or left is None or spans[-1][1] > sealed["last"]:
        return total
    there = 0
    if found is not None:
        if rescued is None or found.base != sealed["base"]:
            return total
        there = rescued.count - sum(first == last and first in rescued.broken for first, last in spans)
    lost = sum(entry.count for entry in left) - there
    return min(total, lost) if lost >= 0 else total  # more remain than the ledger lists, so its count is wrong


def routes_lost(span: Span, segment: Segment | None, history: History) -> list[RouteEntry] | None:
    """Return the routes of the records in ``span``, or None if unknown. ``segment`` had them, if it exists."""
    found = None
    if segment is not None:
        with suppress(Damaged, BadSealed, OSError), SealedFile(segment.path) as sealed:
            found = _by_index(span, sealed.index)
    return found if found is not None else _by_ledger(span, history)


def _by_index(span: Span, index: SealedIndex) -> list[RouteEntry] | None:
    first, last = span
    entries: dict[str, RouteEntry] = {}
    table, routes = index.batch_table(), index.routes
    # records that began before the segment
    begun = {number: entry.last for number, entry in enumerate(routes) if not entry.count}
    for base, count, number in zip(table.bases, table.counts, table.routes, strict=True):
        begin, end = max(first, base), min(last, base + count - 1)
        if begin <= end:
            _add(entries, RouteEntry(routes[number].route, end - begin + 1, begin, end))
        elif not count and number in begun and first <= base <= last + 1:  # a piece of an earlier record
            _add(entries, RouteEntry(routes[number].route, 0, begun[number], begun[number]))
        if count:
            begun[number] = base + count - 1
    dropped = Spans(index.shrunk.ranges if index.shrunk is not None else ()).count(first, last)
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total + dropped == last - first + 1 else None


def _by_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """Return the routes by the ledger, or None unless ``span`` has only whole segments."""
    entries: dict[str, RouteEntry] = {}
    at, end = span
    with suppress(Damaged):
        while at <= end:
            sealed, held, left = history.sealing_of(at), history.sealed_routes(at), history.remaining_routes(at)
            if sealed is None or held is None or left is None or sealed["last"] > end:
                return None
            if sum(entry.count for entry in held) != sealed["last"] - at + 1:
                return None
            for entry in left:
                _add(entries, entry)
            at = sealed["last"] + 1
        return list(entries.values())
    return None


def _add(entries: dict[str, RouteEntry], entry: RouteEntry) -> None:
    """Add a loss. An entry without records makes readers drop an unfinished record."""
    known = entries.get(entry.route)
    if known is None or (entry.count and not known.count):
        entries[entry.route] = entry
    elif entry.count:
        entries[entry.route] = known.plus(entry)


class ActionKind(Enum):
    """Kind of repair action."""

    LEDGER = "ledger"
    IDENTITY = "identity"
    REMOVE = "remove"  # a temporary file
    RENAME = "rename"  # to its own name, or a free one
    PUT_BACK = "put back"  # restore the original of an interrupted shrinking
    SET_ASIDE = "set aside"  # move a file to ``quarantine/``
    CLEAR = "clear away"  # the same for a damaged original, without a ledger line
    REMAKE = "remake"
    GIVE_UP = "give up"  # write a ledger line about records in no segment
    RECORD = "record"  # add the ledger line about a sealed segment
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Act:
    """Action on one path."""

    kind: ActionKind
    path: Path
    reason: str
    lost: tuple[Span, ...] = ()
    lost_records: int = 0  # records in ``lost`` that were not dropped by shrinking
    loses: bool = False  # True if data is lost, which the operator must accept
    facts: SegmentFacts | None = None
    broken: Mapping[int, str] = field(default_factory=dict)  # record → route; a piece is lost
    identity: Identity | None = None
    target: Path | None = None  # new name of a segment, free when the step runs

    @property
    def dropped_records(self) -> int:
        return _length(self.lost) - self.lost_records


def _length(spans: Sequence[Span]) -> int:
    return sum(last - first + 1 for first, last in spans)


class Plan:
    """Actions of a repair, in order. Those in ``before`` replace ledgers and ``log.json``."""

    def __init__(self, facts: LogSurvey, before: Sequence[Act]) -> None:
        self.facts = facts
        self.kept: list[SegmentFacts] = []  # under their own names
        self.renames: list[Act] = []
        set_aside = [act for segment in facts.segments if (act := self._placed(segment)) is not None]
        there = Spans(span for each in self.kept for span in each.repaired_spans)
        # Record → route, if it lost a piece but not its beginning.
        self.broken = {sequence: route for sequence, route in self._broken() if sequence in there}
        self.lost = list(self._lost(there))

        why = "a program was killed while it made this file"
        first = [Act(ActionKind.REMOVE, path, why) for path in facts.leftovers]
        why = "the original of a segment whose shrinking was interrupted is damaged"
        first += [Act(ActionKind.CLEAR, path, why) for path in facts.unneeded]
        first += set_aside
        first += _in_order(self.renames, {each.segment.path for each in facts.segments})
        why = "it is missing or damaged, and its original from before an interrupted shrinking is intact"
        first += [Act(ActionKind.PUT_BACK, path, why) for path in facts.put_back]
        acts = [(each.base, act) for each in self.kept if (act := self._treated(each)) is not None]
        assigned = {span for _, act in acts for span in act.lost}
        why = "no segment has them"
        lost = [(span, records_lost((span,), None, facts.history)) for span in self.lost if span not in assigned]
        path = facts.root.segments
        acts += [(span[0], Act(ActionKind.GIVE_UP, path, why, (span,), count, loses=True)) for span, count in lost]
        repairs = [act for _, act in sorted(acts, key=itemgetter(0))]
        why = "the ledger has no line about its sealing"
        records = [
            Act(ActionKind.RECORD, each.segment.path, why, facts=each)
            for each in self.kept
            if not each.problem and not each.recorded and each.twin is None
        ]
        self.acts = (*before, *first, *repairs, *records, *self._head(repairs))
        repaired = {act.path for act in (*first, *repairs)} | {facts.root.head, facts.root.segments}
        self.left = [found for found in facts.findings if found.path not in repaired]  # findings that no step repairs

    @property
    def loses(self) -> bool:
        return any(act.loses for act in self.acts)

    @property
    def damage(self) -> bool:
        """True if ``wald verify`` reports errors."""
        in_ledgers = any(act.kind in (ActionKind.LEDGER, ActionKind.IDENTITY) for act in self.acts)
        return in_ledgers or bool(self.facts.findings)

    def _placed(self, found: SegmentFacts) -> Act | None:
        """Return the step that sets a file aside, or add the file to ``kept``."""
        due = max((last + 1 for each in self.kept for _, last in each.spans), default=1)
        path, why = found.segment.path, ""
        if found.foreign:
            why = found.problem
        elif self._best(found) is not found:
            why = f"{found.problem or 'it is a duplicate'}, and another file is that segment"
        elif found.base < due and not found.problem and all(last < due for _, last in found.spans):
            why = f"its records, up to {due - 1}, are in older segments"
        if why:
            return Act(ActionKind.SET_ASIDE, path, why, facts=found)
        if found.misnamed:
            target = path.with_name(segment_name(found.base, found.segment.kind))
            self.renames.append(Act(ActionKind.RENAME, path, found.problem, facts=found, target=target))
            problem = found.rescued.reason if found.rescued is not None else ""
            found = replace(found, segment=Segment(found.base, found.segment.kind, target), problem=problem)
        self.kept.append(found)
        return None

    def _best(self, found: SegmentFacts) -> SegmentFacts:
        """Return the best file with the same segment: intact, longest, correctly named."""
        same = [each for each in self.facts.segments if each.base == found.base and not each.foreign]
        return max(
            same, key=lambda each: (each.rescued is None, each.rescued is None and each.spans, not each.misnamed)
        )

    def _broken(self) -> Iterator[tuple[int, str]]:
        for each in self.kept:
            if each.rescued is not None and each.twin_spans is None:
                yield from each.rescued.broken.items()
            yield from ((sequence, route) for route, sequence in each.open_records.items())

    def _lost(self, there: Spans) -> Iterator[Span]:
        """Yield lost spans that no ledger line explains, split at segment bounds."""
        holes = [*there.gaps(1, self.facts.last), *((sequence, sequence) for sequence in self.broken)]
        bases = sorted({each.base for each in self.kept})
        for first, last in sorted(holes):
            for begin, end in self.facts.history.unexplained_spans(first, last):
                inside = sorted({base for base in (*bases, *self._ends(begin, end)) if begin < base <= end})
                for one, other in pairwise([begin, *inside, end + 1]):
                    yield one, other - 1

    def _ends(self, first: int, last: int) -> Iterator[int]:
        """Yield the ends of segments that the ledger lists."""
        with suppress(Damaged):  # given up as one range
            while first <= last and (sealed := self.facts.history.sealing_of(first)) is not None:
                first = int(sealed["last"]) + 1
                yield first

    def _treated(self, found: SegmentFacts) -> Act | None:
        """Return the step that repairs a segment, or None."""
        path, there = found.segment.path, Spans(found.repaired_spans)
        broken = min((sequence for sequence in self.broken if sequence in there), default=None)
        if not found.problem and broken is None:
            return None
        if found.twin_spans is not None and broken is None:
            return Act(ActionKind.SET_ASIDE, path, f"{found.problem}; its raw form is intact", facts=found)
        end = self._end(found)
        lost = tuple(span for span in self.lost if found.base <= span[0] < end)
        reason = found.problem or f"a piece of record {broken} is lost"
        records = records_lost(lost, found, self.facts.history)
        rescued = found.rescued
        # A count from the ledger alone does not prove that nothing is lost.
        guessed = bool(lost) and found.dropped is None
        loses = bool(records or guessed or found.changed or (rescued is not None and rescued.broken))
        if rescued is not None and rescued.is_empty:
            return Act(ActionKind.SET_ASIDE, path, reason, lost, records, loses, found)
        return Act(ActionKind.REMAKE, path, reason, lost, records, loses, found, self.broken)

    def _end(self, found: SegmentFacts) -> int:
        """Return a segment's end. Without a ledger line, a damaged segment ends at the next one."""
        if not found.problem:
            return max(last + 1 for _, last in found.spans)
        following = [each.base for each in self.kept if each.base > found.base]
        return min([next(self._ends(found.base, found.base), 1 << 64), *following])

    def _head(self, acts: list[Act]) -> Iterator[Act]:
        path, head = self.facts.root.head, self.facts.head
        if head is None:
            if self.kept:
                yield Act(ActionKind.HEAD, path, "it is missing or damaged")
            return
        rewritten = [act for act in acts if act.facts is not None and act.facts.base == head.segment]
        if rewritten:
            loses = any(act.loses for act in rewritten)
            yield Act(ActionKind.HEAD, path, "it is in a segment that is rewritten", loses=loses)


def _in_order(renames: list[Act], used: set[Path]) -> Iterator[Act]:
    """Yield renames in an order in which each target is free.

    If segments have each other's names, one first gets an unused name. After a kill, the next repair finds that segment
    misnamed.
    """
    pending = {act.path: act for act in renames}
    while pending:
        act = next((each for each in pending.values() if each.target not in pending), None)
        if act is None:
            act = next(iter(pending.values()))
            assert act.facts is not None
            # The last name in a listing counts as the newest segment, so take the next free one.
            bases = {path.name.partition(".")[0] for path in used}
            number = next(n for n in itertools.count(act.facts.base + 1) if f"{n:020d}" not in bases)
            free = act.path.with_name(segment_name(number, act.facts.segment.kind))
            pending[free] = replace(act, path=free)
            yield replace(act, target=free, reason=f"{act.reason}; another segment has its name until that is renamed")
        else:
            yield act
        del pending[act.path]
