"""Repair plan: the actions that repair a log, and the lost records. It changes nothing.

Segments are repaired oldest first: the one in which a broken record begins comes before one that lost a piece of it.

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


def count_lost_records(spans: Sequence[Span], segment: SegmentFacts | None, history: History) -> int:
    """Return an upper limit of the records lost in ``spans``. ``segment`` contained them, if it exists."""
    total = _count(spans)
    if segment is not None and segment.dropped is not None:
        dropped = Spans(segment.dropped)
        return total - sum(dropped.count(*span) for span in spans)
    remains = None if segment is None else segment.remains
    try:
        sealed = history.sealing_of(spans[0][0]) if spans else None
        is_shrunk = remains is not None and remains.is_shrunk
        remaining = history.remaining_routes(sealed["base"], is_shrunk=is_shrunk) if sealed is not None else None
    except Damaged:
        return total
    if sealed is None or remaining is None or spans[-1][1] > sealed["last"]:
        return total
    intact_count = 0
    if segment is not None:
        if remains is None or segment.base != sealed["base"]:
            return total
        intact_count = remains.count - sum(first == last and first in remains.broken for first, last in spans)
    lost = sum(entry.count for entry in remaining) - intact_count
    return min(total, lost) if lost >= 0 else total  # more are intact than the ledger lists, so its count is wrong


def find_lost_routes(span: Span, segment: Segment | None, history: History) -> list[RouteEntry] | None:
    """Return the routes of the records in ``span``, or None if unknown. ``segment`` contained them, if it exists."""
    routes = None
    if segment is not None:
        with suppress(Damaged, BadSealed, OSError), SealedFile(segment.path) as sealed:
            routes = _routes_in_index(span, sealed.index)
    return routes if routes is not None else _routes_in_ledger(span, history)


def _routes_in_index(span: Span, index: SealedIndex) -> list[RouteEntry] | None:
    first, last = span
    entries: dict[str, RouteEntry] = {}
    table, routes = index.batch_table(), index.routes
    # Route id → newest record, even if it began before the segment.
    newest = {number: entry.last for number, entry in enumerate(routes) if not entry.count}
    for base, count, number in zip(table.bases, table.counts, table.routes, strict=True):
        begin, end = max(first, base), min(last, base + count - 1)
        if begin <= end:
            _add_entry(entries, RouteEntry(routes[number].route, end - begin + 1, begin, end))
        elif not count and number in newest and first <= base <= last + 1:  # a piece of an earlier record
            _add_entry(entries, RouteEntry(routes[number].route, 0, newest[number], newest[number]))
        if count:
            newest[number] = base + count - 1
    dropped = Spans(index.shrunk.ranges if index.shrunk is not None else ()).count(first, last)
    total = sum(entry.count for entry in entries.values())
    return list(entries.values()) if total + dropped == last - first + 1 else None


def _routes_in_ledger(span: Span, history: History) -> list[RouteEntry] | None:
    """Return the routes listed in the ledger, or None unless ``span`` consists of whole segments."""
    entries: dict[str, RouteEntry] = {}
    base, end = span
    with suppress(Damaged):
        while base <= end:
            sealed, routes = history.sealing_of(base), history.sealed_routes(base)
            remaining = history.remaining_routes(base)
            if sealed is None or routes is None or remaining is None or sealed["last"] > end:
                return None
            if sum(entry.count for entry in routes) != sealed["last"] - base + 1:
                return None
            for entry in remaining:
                _add_entry(entries, entry)
            base = sealed["last"] + 1
        return list(entries.values())
    return None


def _add_entry(entries: dict[str, RouteEntry], entry: RouteEntry) -> None:
    """Add a loss. An entry without records makes readers drop an unfinished record."""
    previous = entries.get(entry.route)
    if previous is None or (entry.count and not previous.count):
        entries[entry.route] = entry
    elif entry.count:
        entries[entry.route] = previous.plus(entry)


class ActionKind(Enum):
    """Kind of repair action, as in ledgers and JSON."""

    REBUILD_LEDGER = "ledger"
    REWRITE_IDENTITY = "identity"
    REMOVE = "remove"  # a temporary file
    RENAME = "rename"  # a segment to its own name, or a free one
    RESTORE = "put back"  # the original of an interrupted shrinking
    QUARANTINE = "set aside"
    QUARANTINE_ORIGINAL = "clear away"  # a damaged original, without a ledger line
    REBUILD = "remake"
    GIVE_UP = "give up"  # records that no segment contains
    RECORD_SEALING = "record"
    MOVE_HEAD = "head"


@dataclass(frozen=True, slots=True)
class Action:
    """Repair action on one path."""

    kind: ActionKind
    path: Path
    reason: str
    lost_spans: tuple[Span, ...] = ()
    lost_records: int = 0  # records in ``lost_spans`` that shrinking had not dropped
    loses_data: bool = False  # the operator must accept a loss
    facts: SegmentFacts | None = None
    broken: Mapping[int, str] = field(default_factory=dict)  # record that lost a piece → route
    identity: Identity | None = None
    target: Path | None = None  # new path of a segment, free when the action runs

    @property
    def dropped_records(self) -> int:
        return _count(self.lost_spans) - self.lost_records


def _count(spans: Sequence[Span]) -> int:
    return sum(last - first + 1 for first, last in spans)


class Plan:
    """Actions of a repair, in order. ``before`` has those that replace ledgers and ``log.json``."""

    def __init__(self, survey: LogSurvey, before: Sequence[Action]) -> None:
        self.survey = survey
        self.kept_segments: list[SegmentFacts] = []  # under their own names
        self.renames: list[Action] = []
        quarantined = [action for each in survey.segments if (action := self._keep_or_quarantine(each)) is not None]
        kept_spans = Spans(span for each in self.kept_segments for span in each.repaired_spans)
        # Record → route, if it lost a piece but not its beginning.
        self.broken = {sequence: route for sequence, route in self._broken_records() if sequence in kept_spans}
        self.lost_spans = list(self._unexplained_spans(kept_spans))

        why = "a killed program left this temporary file"
        preparations = [Action(ActionKind.REMOVE, path, why) for path in survey.leftovers]
        why = "it is the damaged original of a segment whose shrinking was interrupted"
        preparations += [Action(ActionKind.QUARANTINE_ORIGINAL, path, why) for path in survey.damaged_originals]
        preparations += quarantined
        preparations += _ordered_renames(self.renames, {each.segment.path for each in survey.segments})
        why = "it is missing or damaged, and its original from before an interrupted shrinking is intact"
        preparations += [Action(ActionKind.RESTORE, path, why) for path in survey.originals]
        by_base = [(each.base, action) for each in self.kept_segments if (action := self._repair(each)) is not None]
        assigned = {span for _, action in by_base for span in action.lost_spans}
        path, why = survey.root.segments, "no segment contains these records"
        for span in self.lost_spans:
            if span not in assigned:
                count = count_lost_records((span,), None, survey.history)
                by_base.append((span[0], Action(ActionKind.GIVE_UP, path, why, (span,), count, loses_data=True)))
        repairs = [action for _, action in sorted(by_base, key=itemgetter(0))]
        why = "the ledger has no line about its sealing"
        records = [
            Action(ActionKind.RECORD_SEALING, each.segment.path, why, facts=each)
            for each in self.kept_segments
            if not each.problem and not each.is_in_ledger and each.twin is None
        ]
        self.actions = (*before, *preparations, *repairs, *records, *self._head_actions(repairs))
        repaired = {action.path for action in (*preparations, *repairs)} | {survey.root.head, survey.root.segments}
        self.unrepaired = [finding for finding in survey.findings if finding.path not in repaired]

    @property
    def loses_data(self) -> bool:
        return any(action.loses_data for action in self.actions)

    @property
    def damage(self) -> bool:
        """True if ``wald verify`` reports errors."""
        kinds = {action.kind for action in self.actions}
        return bool(kinds & {ActionKind.REBUILD_LEDGER, ActionKind.REWRITE_IDENTITY} or self.survey.findings)

    def _keep_or_quarantine(self, facts: SegmentFacts) -> Action | None:
        """Return the action that quarantines a file, or add the file to ``kept_segments``."""
        next_sequence = max((last + 1 for each in self.kept_segments for _, last in each.spans), default=1)
        path, why = facts.segment.path, ""
        if facts.is_foreign:
            why = facts.problem
        elif self._best(facts) is not facts:
            why = f"{facts.problem or 'it is a duplicate'}, and another file contains that segment"
        elif facts.base < next_sequence and not facts.problem and all(last < next_sequence for _, last in facts.spans):
            why = f"older segments contain its records, up to {next_sequence - 1}"
        if why:
            return Action(ActionKind.QUARANTINE, path, why, facts=facts)
        if facts.is_misnamed:
            target = path.with_name(segment_name(facts.base, facts.segment.kind))
            self.renames.append(Action(ActionKind.RENAME, path, facts.problem, facts=facts, target=target))
            problem = facts.remains.damage if facts.remains is not None else ""
            facts = replace(facts, segment=Segment(facts.base, facts.segment.kind, target), problem=problem)
        self.kept_segments.append(facts)
        return None

    def _best(self, facts: SegmentFacts) -> SegmentFacts:
        """Return the best file with the same segment: intact, longest, correctly named."""
        same = [each for each in self.survey.segments if each.base == facts.base and not each.is_foreign]
        return max(same, key=lambda s: (s.remains is None, s.remains is None and s.spans, not s.is_misnamed))

    def _broken_records(self) -> Iterator[tuple[int, str]]:
        for each in self.kept_segments:
            if each.remains is not None and each.twin_spans is None:
                yield from each.remains.broken.items()
            yield from ((sequence, route) for route, sequence in each.open_records.items())

    def _unexplained_spans(self, kept_spans: Spans) -> Iterator[Span]:
        """Yield lost spans that no ledger line explains, split at segment bounds."""
        holes = [*kept_spans.gaps(1, self.survey.last), *((sequence, sequence) for sequence in self.broken)]
        bases = sorted({each.base for each in self.kept_segments})
        for first, last in sorted(holes):
            for begin, end in self.survey.history.unexplained_spans(first, last):
                bounds = sorted({base for base in (*bases, *self._recorded_ends(begin, end)) if begin < base <= end})
                for start, stop in pairwise([begin, *bounds, end + 1]):
                    yield start, stop - 1

    def _recorded_ends(self, first: int, last: int) -> Iterator[int]:
        """Yield the ends of consecutive segments that the ledger lists."""
        with suppress(Damaged):  # the records are then given up as one range
            while first <= last and (sealed := self.survey.history.sealing_of(first)) is not None:
                first = int(sealed["last"]) + 1
                yield first

    def _repair(self, facts: SegmentFacts) -> Action | None:
        path, spans = facts.segment.path, Spans(facts.repaired_spans)
        broken = min((sequence for sequence in self.broken if sequence in spans), default=None)
        if not facts.problem and broken is None:
            return None
        if facts.twin_spans is not None and broken is None:
            return Action(ActionKind.QUARANTINE, path, f"{facts.problem}; its raw form is intact", facts=facts)
        end = self._segment_end(facts)
        lost_spans = tuple(span for span in self.lost_spans if facts.base <= span[0] < end)
        reason = facts.problem or f"a piece of record {broken} is lost"
        lost_records = count_lost_records(lost_spans, facts, self.survey.history)
        remains = facts.remains
        # A count from the ledger alone does not prove that nothing is lost.
        is_estimate = bool(lost_spans) and facts.dropped is None
        loses_data = bool(lost_records or is_estimate or facts.is_changed or (remains is not None and remains.broken))
        if remains is not None and remains.is_empty:
            return Action(ActionKind.QUARANTINE, path, reason, lost_spans, lost_records, loses_data, facts)
        return Action(ActionKind.REBUILD, path, reason, lost_spans, lost_records, loses_data, facts, self.broken)

    def _segment_end(self, facts: SegmentFacts) -> int:
        """Return a segment's next sequence. Without a ledger line, a damaged segment ends at the next one."""
        if not facts.problem:
            return max(last + 1 for _, last in facts.spans)
        following = [each.base for each in self.kept_segments if each.base > facts.base]
        return min([next(self._recorded_ends(facts.base, facts.base), 1 << 64), *following])

    def _head_actions(self, actions: list[Action]) -> Iterator[Action]:
        path, head = self.survey.root.head, self.survey.head
        if head is None:
            if self.kept_segments:
                yield Action(ActionKind.MOVE_HEAD, path, "it is missing or damaged")
            return
        rewritten = [action for action in actions if action.facts is not None and action.facts.base == head.segment]
        loses_data = any(action.loses_data for action in rewritten)
        if rewritten:
            yield Action(ActionKind.MOVE_HEAD, path, "its segment is rewritten", loses_data=loses_data)


def _ordered_renames(renames: list[Action], used: set[Path]) -> Iterator[Action]:
    """Yield renames, ordered so that each target is free.

    If segments have each other's names, one first gets an unused name. After a kill, the next repair renames it.
    """
    pending = {action.path: action for action in renames}
    while pending:
        action = next((each for each in pending.values() if each.target not in pending), None)
        if action is None:
            action = next(iter(pending.values()))
            assert action.facts is not None
            # The last name in a listing counts as the newest segment, so take the next free one.
            bases = {path.name.partition(".")[0] for path in used}
            number = next(n for n in itertools.count(action.facts.base + 1) if f"{n:020d}" not in bases)
            free = action.path.with_name(segment_name(number, action.facts.segment.kind))
            pending[free] = replace(action, path=free)
            yield replace(action, target=free, reason=f"{action.reason}; its own name is not free yet")
        else:
            yield action
        del pending[action.path]
