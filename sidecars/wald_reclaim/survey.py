"""Survey of complete segments by directory, cursors and ledgers, for decisions of the policy.

Nothing is changed here. A survey serves many passes: it caches the immutable facts about a segment, and one group that
pins it. While the group still pins it, the segment is not opened again, so a pass over a long backlog is cheap.
Cursors are read again during a long pass, so that no decision rests on old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.files import uptime
from wald.files.layout import Root
from wald.files.listing import Listing, Segment, find_being_sealed, list_segments
from wald.files.uptime import Moment
from wald.format.ledger_lines import Entry
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, RouteTable, SealedIndex
from wald.hints import hint_for
from wald.retention.blockers import (
    CursorSnapshot,
    Pin,
    read_cursor_snapshot,
    required_positions,
    segment_index,
    with_lost_routes,
)
from wald.retention.history import History
from wald.segments.durable_end import Bound
from wald.segments.reader import Misplaced, require_matching_name
from wald.segments.view import read_view
from wald_reclaim.evidence import (
    COUNTED_AGAIN,
    SEALED_SINCE,
    UNEXPLAINED,
    Ages,
    DeletionEvidence,
    RecordedDeletion,
    can_share,
    reclaimed_entry,
    routes_json,
    with_damaged_frames,
)
from wald_reclaim.policy import (
    Facts,
    Limits,
    RouteAmounts,
    Verdict,
    exceeded_limit,
    is_grace_over,
    judge,
    unread_records,
)

CURSORS_SECONDS = 0.25  # older cursors are read again; reading a thousand takes about a third of that
_CURSORS_SHARE = 10  # times the duration of the last reading, if that is more: at most a tenth of a pass
_RAW_SECONDS = 5.0  # after this, a cut segment that the sealer has not sealed may be deleted raw


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about one complete or released segment."""

    segment: Segment
    verdict: Verdict
    stored_bytes: int
    pin: Pin | None = None
    entry: Entry | None = None  # line to write into the ledger first, unless it was written before
    message: str = ""  # problem with the segment, or ""
    withdrawal: Entry | None = None  # line to write before ``entry``, which withdraws an earlier one
    is_pinned_alone: bool = False  # no other route than that of ``pin`` pins it
    is_shrinkable: bool = False  # sealed, and only kept because some of its records are unread
    evidence: DeletionEvidence | None = None  # part of ``entry`` for a line that it shares with others
    keeps_name: bool = False  # the file keeps its name, because it is another segment or the new name exists


class _Unreadable(Exception):
    """Error: the contents of a segment are unknown, so it stays, and the pass continues with the others."""


@dataclass(slots=True)
class _Known:
    """The few facts about a complete segment that are cached between passes; there may be many segments."""

    kind: Kind
    stored_bytes: int
    is_opened: bool = False  # its index was read, or cannot be
    records: int = 0
    pins: tuple[Pin, ...] = ()  # one of each of two routes at most
    problem: str = ""
    damage: str = ""  # damage of its index, although its contents are known from elsewhere


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A segment to decide about; ``index`` is None unless it was just read, and ``log_limit`` the limit exceeded."""

    segment: Segment
    known: _Known
    index: SealedIndex | None
    facts: Facts
    log_limit: Verdict | None
    cursors: CursorSnapshot
    now_ns: int


class Survey:
    """Survey of the segments of ``root``; with ``verify`` it reads the frames of each one before its deletion."""

    def __init__(
        self,
        root: Root,
        limits: Limits,
        *,
        log_id: bytes,
        verify: bool = False,
        clock: Callable[[], float] = time.monotonic,
        moment: Callable[[], Moment] = uptime.now,
    ) -> None:
        self._root = root
        self.log_id = log_id
        self.clock = clock
        self._moment = moment
        self.history = History(root)
        self._ages = Ages(root, moment)
        self.set_limits(limits, verify=verify)
        self._known: dict[int, _Known] = {}
        self._raw_since: dict[int, float] | None = None
        self._successors: dict[int, int] = {}
        self.problems: list[str] = []
        self._cursors = CursorSnapshot()  # read last
        self._unpinned: set[int] = set()  # segments that no group pins under these
        self._recorded: dict[int, RecordedDeletion] = {}
        listing = self._list()
        bases = {segment.base_sequence for segment in (*listing.segments, *listing.released)}
        for entry in self.history.latest_deletions(bases):
            self.record(entry)

    def set_limits(self, limits: Limits, *, verify: bool) -> None:
        self._limits, self._verify, self._amounts = limits, verify, RouteAmounts(limits)

    def record(self, entry: Entry) -> None:
        """Update the recorded deletions from a line that was appended to the ledger."""
        base = entry.get("base")
        if not isinstance(base, int) or entry.get("event") == "evidence":
            return
        if entry.get("event") == "reclaimed":
            self._recorded[base] = RecordedDeletion.parse(entry)
        else:
            self._recorded.pop(base, None)

    def forget_deleted(self, segment: Segment) -> None:
        self._recorded.pop(segment.base_sequence, None)
        self._unpinned.discard(segment.base_sequence)

    def forget_file(self, segment: Segment) -> None:
        """Forget the cached contents of a segment whose name is about to refer to another file."""
        self._known.pop(segment.base_sequence, None)

    def seen_entry(self, *, now_ns: int) -> Entry | None:
        """Return the line that will prove ages later, if it is due and a limit depends on ages."""
        complete = list_segments(self._root).segments[:-1]
        if not complete or not self._limits.by_age:
            return None
        return self._ages.seen_entry(complete[-1].base_sequence, now_ns=now_ns)

    def kept(self, segment: Segment, why: str, now_ns: int) -> Entry:
        return self.stamped({"event": "kept", "base": segment.base_sequence, "why": why, "at": now_ns})

    def stamped(self, entry: Entry) -> Entry:
        """Add the time since boot, from which the grace period is measured."""
        return entry | self._moment().as_entry()

    def released(self) -> tuple[Segment, ...]:
        return self._list().released

    def due(self, released: Iterable[Segment], *, grace_ns: int) -> list[Segment]:
        now = self._moment()

        def is_due(segment: Segment) -> bool:
            recorded = self._recorded.get(segment.base_sequence)
            since = recorded.since if recorded is not None else None
            return segment.kind is segment.kind.deleting or is_grace_over(since, now, grace_ns)

        return list(filter(is_due, released))

    def decisions(self, *, now_ns: int) -> Iterator[Decision]:
        """Decide about each segment that is sealed or has waited for the sealer for a while; oldest first."""
        view = read_view(self._root, self.log_id)
        listing = self._list(view.listing)
        raw = self._deletable_raw(view.bound, listing)
        complete = [s for s in listing.segments if s.kind is Kind.SEALED or s.base_sequence in raw]
        bases = {segment.base_sequence for segment in complete}
        if self._limits.by_age:
            self._ages.update(bases)
        cursors, expires = self._read_cursors()
        sealing = find_being_sealed(self._root, [s.base_sequence for s in complete if s.kind is Kind.RAW])
        raw_released = {segment.base_sequence for segment in listing.released if segment.kind.form is Kind.RAW}
        self._known = {base: known for base, known in self._known.items() if base in bases}
        waiting: list[tuple[Segment, _Known, int, int]] = []
        newer_bytes = newer_records = 0
        for segment in reversed(complete):
            if (known := self._size_up(segment)) is not None:
                waiting.append((segment, known, newer_bytes, newer_records))
                newer_bytes += known.stored_bytes
                newer_records += known.records
        segments = {segment.base_sequence: segment for segment, *_ in waiting}
        sizes = {segment.base_sequence: known.stored_bytes for segment, known, *_ in waiting}
        self._amounts.count(sizes, lambda base: self._routes(segments[base]))
        while waiting:
            if self.clock() >= expires:
                cursors, expires = self._read_cursors()
            segment, known, newer_bytes, newer_records = waiting.pop()
            base = segment.base_sequence
            with suppress(FileNotFoundError):  # deleted in between
                index = None if known.is_opened else self._open(segment, known)
                is_sealed = segment.kind is Kind.SEALED
                in_both_forms = is_sealed and self._root.segment(base, Kind.RAW).exists()
                facts = Facts(
                    age_ns=self._ages.at_least_ns(base) if self._limits.by_age else 0,
                    stored_bytes=known.stored_bytes,
                    records=known.records,
                    newer_bytes=newer_bytes,
                    newer_records=newer_records,
                    is_archived=True,
                    is_newest=segment is listing.segments[-1],
                    is_being_sealed=in_both_forms or base in (raw_released if is_sealed else sealing),
                    is_readable=not known.problem,
                )
                log_limit = exceeded_limit(facts, self._limits)
                yield self._decide(_Candidate(segment, known, index, facts, log_limit, cursors, now_ns))

    def _decide(self, of: _Candidate) -> Decision:
        """Decide by the cached facts, and by the index if the verdict depends on it."""
        segment, known = of.segment, of.known
        recorded = self._recorded.get(segment.base_sequence)
        withdrawal = None
        if recorded is not None and recorded.form is not segment.kind.form:
            # Its line has neither the digest nor the size of the sealed form.
            recorded, withdrawal = None, self.kept(segment, SEALED_SINCE, of.now_ns)
        rule = Verdict.EACH_ROUTE if self._may_exceed(of) else of.log_limit or Verdict.READ
        verdict = judge(of.facts, self._limits, [rule])
        pins: tuple[Pin, ...] = ()
        entry: Entry | None = None
        evidence: DeletionEvidence | None = None
        if verdict.is_deletion:  # as far as is known without opening it
            try:
                verdict, entry, evidence = self._judge_contents(of, is_recorded=recorded is not None)
                pins = known.pins
            except (_Unreadable, BadSealed) as error:  # readable in an earlier pass, or the loss cannot be counted
                known.problem = str(error)
                verdict = Verdict.UNREADABLE
        if recorded is not None and not verdict.is_deletion:
            entry = self.kept(segment, verdict.value, of.now_ns)
        is_only_unread = verdict is Verdict.UNREAD and segment.kind is Kind.SEALED and not known.damage
        return Decision(
            segment,
            verdict,
            known.stored_bytes,
            pins[0] if pins else None,
            entry,
            known.problem or known.damage,
            withdrawal,
            is_pinned_alone=len(pins) == 1,
            is_shrinkable=is_only_unread and judge(of.facts, self._limits, [of.log_limit or Verdict.READ]).is_deletion,
            evidence=evidence,
        )

    def _may_exceed(self, of: _Candidate) -> bool:
        return self._amounts.may_exceed(of.segment.base_sequence, of.facts.age_ns, of.log_limit)

    def _judge_contents(
        self, of: _Candidate, *, is_recorded: bool
    ) -> tuple[Verdict, Entry | None, DeletionEvidence | None]:
        """Return the verdict, a new line for the ledger if needed, and its evidence for a shared line."""
        segment, known, cursors, base = of.segment, of.known, of.cursors, of.segment.base_sequence
        if known.pins and all(
            cursors.still_pins(pin) and not self._amounts.may_lose(pin.route, base, of.facts.age_ns, of.log_limit)
            for pin in known.pins
        ):
            return Verdict.UNREAD, None, None
        index = of.index or self._index(segment)[0]
        pins, rules = self._judge_routes(of, index)
        known.pins = _of_two_routes(pin for pin in pins if rules[pin.route] is Verdict.UNREAD)
        facts = replace(of.facts, is_archived=self._is_archived(index, cursors))
        verdict = judge(facts, self._limits, rules.values())
        if verdict.is_deletion and not pins and cursors is self._cursors:
            self._unpinned.add(base)
        if not verdict.is_deletion or is_recorded:
            return verdict, None, None
        if self._verify and segment.kind is Kind.SEALED:
            index, damage = with_damaged_frames(segment, index)
            known.damage = damage or known.damage
        lost = unread_records(index, cursors) if pins else {}
        is_sharing = verdict is not Verdict.EACH_ROUTE and not lost and can_share(segment, index)
        evidence = DeletionEvidence(index.routes, cursors) if is_sharing else None
        routes = None if is_sharing else routes_json(index.routes, cursors, _by_route(verdict, rules))
        entry = reclaimed_entry(segment, index, verdict, routes, lost, known.stored_bytes, of.now_ns)
        return verdict, self.stamped(entry), evidence

    def _judge_routes(self, of: _Candidate, index: SealedIndex) -> tuple[Collection[Pin], Mapping[str, Verdict]]:
        """Return the groups that have not read the segment, and the verdict of each route in it.

        If no route exceeds its own limits, one group each of two routes is enough.
        """
        needed, log_limit = self._required(of.segment, index), of.log_limit
        if not self._may_exceed(of):
            pins = _of_two_routes(of.cursors.pins(needed))
            unread = log_limit if log_limit is not None and self._limits.others.expire else Verdict.UNREAD
            return pins, {pin.route: unread for pin in pins} or {"": log_limit or Verdict.READ}
        all_pins = list(of.cursors.pins(needed))
        counted = unread_records(index, of.cursors)
        unread_by_route = {pin.route: counted.get(pin.route, 0) for pin in all_pins}
        base, age_ns = of.segment.base_sequence, of.facts.age_ns
        return all_pins, self._amounts.verdicts(base, age_ns, log_limit, needed, unread_by_route)

    def confirm(self, released: Iterable[Segment], *, now_ns: int) -> list[Decision]:
        """Decide about released segments again: a group may need them, or they may not be archived.

        The cursors are read after the names have changed.
        """
        renamed = list(released)
        raw = {segment.base_sequence for segment in renamed if segment.kind.form is Kind.RAW}
        sealing = find_being_sealed(self._root, raw) if raw else set()
        cursors, _ = self._read_cursors()
        decisions = []
        for segment in renamed:
            with suppress(FileNotFoundError):  # deleted in between, and this is a dry run
                is_sealing = segment.kind.form is Kind.RAW and segment.base_sequence in sealing
                decisions.append(self._confirm(segment, cursors, now_ns, is_sealing=is_sealing))
        return decisions

    def _confirm(self, segment: Segment, cursors: CursorSnapshot, now_ns: int, *, is_sealing: bool) -> Decision:
        base = segment.base_sequence
        stored_bytes, recorded = segment.path.stat().st_size, self._recorded.get(base)
        try:
            require_matching_name(segment, self.log_id)
        except Misplaced as error:  # the ledger's line is about another file
            return Decision(segment, Verdict.UNREADABLE, stored_bytes, message=str(error), keeps_name=True)
        verdict = recorded.verdict if recorded is not None else Verdict.READ
        must_count = recorded is not None and recorded.lost  # lost records are counted again
        is_unpinned = base in self._unpinned and not must_count and not self._limits.require_archived
        pin, entry, message = None, None, ""
        if is_sealing:
            verdict = Verdict.SEALING
        elif not is_unpinned and not self._is_sealed(base):
            try:
                verdict, pin, entry = self._confirm_contents(segment, verdict, recorded, cursors, now_ns)
            except _Unreadable as error:
                verdict, message = Verdict.UNREADABLE, str(error)
        withdrawal = None
        if recorded is not None and not verdict.is_deletion:
            entry = self.kept(segment, verdict.value, now_ns)
        elif recorded is not None and entry is not None:
            withdrawal = self.kept(segment, COUNTED_AGAIN, now_ns)
        elif recorded is None and verdict.is_deletion:
            last = base
            with suppress(_Unreadable):
                last = self._index(segment)[0].next_sequence - 1
            line = {"event": "reclaimed", "base": base, "last": last, "rule": UNEXPLAINED, "at": now_ns}
            entry = self.stamped(line)
        return Decision(segment, verdict, stored_bytes, pin, entry, message, withdrawal)

    def _confirm_contents(
        self,
        segment: Segment,
        verdict: Verdict,
        recorded: RecordedDeletion | None,
        cursors: CursorSnapshot,
        now_ns: int,
    ) -> tuple[Verdict, Pin | None, Entry | None]:
        """Return the verdict by the index, and a new line if the segment is deleted now and its losses have changed."""
        index = self._index(segment)[0]
        pins = list(cursors.pins(self._required(segment, index)))
        lost = recorded.lost if recorded is not None else {}
        needing = (each for each in pins if each.route not in lost or not self._limits.may_lose(each.route))
        if pin := next(needing, None):
            return Verdict.UNREAD, pin, None
        if not self._is_archived(index, cursors):
            return Verdict.NOT_ARCHIVED, None, None
        if not pins:
            self._unpinned.add(segment.base_sequence)
        unread = unread_records(index, cursors)
        if recorded is None or segment.kind is not segment.kind.deleting or unread == lost:
            return verdict, None, None
        rules = {name: recorded.rules.get(name, Verdict.READ) for name in index.routes.names}
        routes = routes_json(index.routes, cursors, _by_route(verdict, rules))
        stored_bytes = segment.path.stat().st_size
        entry = reclaimed_entry(segment, index, verdict, routes, unread, stored_bytes, now_ns)
        return verdict, None, self.stamped(entry)

    def _is_sealed(self, base: int) -> bool:
        """Return True if the name of the sealed form exists and is that form of the segment."""
        sealed = Segment(base, Kind.SEALED, self._root.segment(base, Kind.SEALED))
        try:
            require_matching_name(sealed, self.log_id)
        except (FileNotFoundError, Misplaced):
            return False
        return True

    def _list(self, listing: Listing | None = None) -> Listing:
        listing = listing or list_segments(self._root)
        self._successors = listing.successors()
        return listing

    def _deletable_raw(self, bound: Bound, listing: Listing) -> set[int]:
        """Return the complete raw segments that the sealer has not sealed for a while; in the first pass, all of them.

        The segment of the head is excluded: a starting daemon reads it to learn which bytes of its pipes are in the
        log, and moves the head only then.
        """
        raw = [segment.base_sequence for segment in listing.segments[:-1] if segment.kind is Kind.RAW]
        now = self.clock()
        before, first = (self._raw_since, now) if self._raw_since is not None else ({}, now - _RAW_SECONDS)
        self._raw_since = {base: before.get(base, first) for base in raw if base < bound.segment}
        return {base for base, since in self._raw_since.items() if now - since >= _RAW_SECONDS}

    def _read_cursors(self) -> tuple[CursorSnapshot, float]:
        began = self.clock()
        cursors = read_cursor_snapshot(self._root, log_id=self.log_id)
        if not cursors.pins_nothing_new(self._cursors):
            self._unpinned.clear()
        self._cursors = cursors
        self.problems = [*cursors.problems(), *([self._ages.problem] if self._ages.problem else [])]
        return cursors, began + max(CURSORS_SECONDS, _CURSORS_SHARE * (self.clock() - began))

    def _size_up(self, segment: Segment) -> _Known | None:
        """Return the cached facts about a segment; None if it was deleted. An unreadable one is tried again."""
        known = self._known.get(segment.base_sequence)
        try:
            if known is None or known.problem or known.kind is not segment.kind:
                known = _Known(segment.kind, segment.path.stat().st_size)
            if self._limits.max_records is not None and not known.is_opened:
                self._open(segment, known)
        except FileNotFoundError:
            return None
        self._known[segment.base_sequence] = known
        return known

    def _open(self, segment: Segment, known: _Known) -> SealedIndex | None:
        try:
            index, known.damage = self._index(segment)
            self._required(segment, index)
        except _Unreadable as error:
            known.is_opened, known.problem = True, str(error)
            return None
        known.is_opened = True
        dropped = index.shrunk.routes if index.shrunk is not None else ()
        known.records = index.next_sequence - index.base_sequence - sum(entry.count for entry in dropped)
        return index

    def _index(self, segment: Segment) -> tuple[SealedIndex, str]:
        try:
            index, damage = segment_index(segment, self.log_id)
            if damage is None:
                return index, ""
            following = self._successors.get(segment.base_sequence)
            index = with_lost_routes(index, segment, following, self.history, damage)
        except Damaged as error:
            raise _Unreadable(f"{error.message}; {error.hint}") from error
        source = "its frames show its contents" if index.sha256 else "segments.jsonl lists its former contents"
        return index, f"{damage.message}; {source}"

    def _required(self, segment: Segment, index: SealedIndex) -> RouteTable:
        """Return the routes of a segment with the records that their cursors must reach before it is deleted."""
        following = self._successors.get(index.base_sequence, index.next_sequence)
        try:
            return required_positions(index, following, self.history)
        except BadSealed as error:
            hint = hint_for("lost-routes-unknown", root=segment.path.parents[1])
            raise _Unreadable(f"{segment.path}: it is damaged: {error}; {hint}") from error

    def _routes(self, segment: Segment) -> RouteTable:
        with suppress(_Unreadable, FileNotFoundError):
            return self._index(segment)[0].routes
        return RouteTable.from_entries([])

    def _is_archived(self, index: SealedIndex, cursors: CursorSnapshot) -> bool:
        """Return True if archiving is not required, or every record of a route that is not retired is in a bundle."""
        return not self._limits.require_archived or all(
            self.history.all_archived(entry.route, entry.first, entry.last)
            for entry in index.routes
            if entry.route not in cursors.retired
        )


def _by_route(verdict: Verdict, rules: Mapping[str, Verdict]) -> Mapping[str, Verdict]:
    return rules if verdict is Verdict.EACH_ROUTE else {}


def _of_two_routes(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    remaining = iter(pins)
    first = next(remaining, None)
    other = next((pin for pin in remaining if first and pin.route != first.route), None)
    return tuple(filter(None, (first, other)))
