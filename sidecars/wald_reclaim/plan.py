"""What is to be deleted now, from the directory, the cursors and the ledgers; nothing is changed here.

A planner may be asked many times. It keeps what never changes of each segment, and one group that held it back: as long
as that group does, the segment is not opened again, so a pass costs little however many segments wait. A pass over very
many takes a while; the cursors are read again on the way, so that no decision rests on old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from wald.files import uptime
from wald.files.layout import Root
from wald.files.listing import Segment, find_being_sealed, list_segments
from wald.files.uptime import Moment
from wald.format.ledger_lines import Entry
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, SealedIndex
from wald.retention.blockers import CursorSnapshot, Pin, read_cursor_snapshot
from wald.segments.reader import Misplaced, require_matching_name
from wald.segments.view import read_view
from wald_reclaim.ages import Ages
from wald_reclaim.contents import Contents, Unreadable
from wald_reclaim.decision import Decision
from wald_reclaim.entries import (
    COUNTED_AGAIN,
    SEALED_SINCE,
    damaged_frames,
    kept_entry,
    may_share,
    reclaimed_entry,
    unexplained_entry,
    unread_records,
)
from wald_reclaim.excuses import Excuse, Excuses
from wald_reclaim.known import Known
from wald_reclaim.policy import Facts, Limits, Verdict, judge, over
from wald_reclaim.recorded import OnRecord, Recorded
from wald_reclaim.routes import Routes
from wald_reclaim.waiting import WaitingRaw

CLAIMS_SECONDS = 0.25  # claims older than this are read again; a thousand cursors take about a third of it
_CLAIMS_SHARE = 10  # times the duration of the last reading, if that is more: at most a tenth of a pass is spent on it


class Planner:
    """Decides about the segments of ``root`` for one process.

    Args:
        verify: whether to read the frames of a sealed segment before it is deleted, and record damage in its line.

    Attributes:
        log_id: of the log.
        troubles: what is wrong with cursors, as of the last pass.
    """

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
        self._limits = limits
        self.log_id = log_id
        self._verify = verify
        self._clock = clock
        self._moment = moment
        self._ages = Ages(root, moment)
        self._contents = Contents(root, log_id)
        self._routes = Routes(limits)
        self._known: dict[int, Known] = {}
        self._waiting = WaitingRaw(clock)
        self.troubles: list[str] = []
        self._recorded = OnRecord()
        self._excuses = Excuses()
        self._claims = CursorSnapshot()
        """Those that were read last."""
        self._passed: set[int] = set()
        """The segments that no group pins under these."""
        listing = self._contents.take_in(list_segments(self._root))
        there = {segment.base_sequence for segment in (*listing.segments, *listing.released)}
        for entry in self._contents.history.latest_deletions(there):
            self._recorded.take_in(entry)

    def take_over(self, limits: Limits, *, verify: bool) -> None:
        """Go on with other limits."""
        self._limits, self._verify, self._routes = limits, verify, Routes(limits)

    def record(self, entry: Entry) -> None:
        """Take in a line that was appended to the ledger."""
        self._recorded.take_in(entry)

    def witness(self, *, now_ns: int) -> Entry | None:
        """The line for the ledger that makes ages known later; None: none is due, or no limit asks for ages."""
        complete = list_segments(self._root).segments[:-1]
        if not complete or not self._limits.by_age:
            return None
        return self._ages.witness(complete[-1].base_sequence, now_ns=now_ns)

    def forget(self, segment: Segment) -> None:
        """Take in that the file is deleted."""
        self._recorded.forget(segment.base_sequence)
        self._passed.discard(segment.base_sequence)

    def changed(self, segment: Segment) -> None:
        """Take in that its name is about to be that of another file."""
        self._known.pop(segment.base_sequence, None)

    def kept(self, segment: Segment, why: str, now_ns: int) -> Entry:
        """The line by which an earlier one about a segment does not hold any more."""
        return self._stamped(kept_entry(segment.base_sequence, why, now_ns))

    def released(self) -> tuple[Segment, ...]:
        """The released segments that still exist, oldest first."""
        return self._contents.take_in(list_segments(self._root)).released

    def due(self, released: Iterable[Segment], *, grace_ns: int) -> list[Segment]:
        """Those whose grace period is over: counted from their line, or ended by a new boot, which ends all readers."""
        return self._recorded.due(released, self._moment(), grace_ns=grace_ns)

    def confirm(self, released: Iterable[Segment], *, now_ns: int) -> list[Decision]:
        """Decide again about segments that were released; the cursors are read after their names have changed.

        Only what may have changed is asked again: whether a group needs the segment, and whether it is archived.

        Raises:
            Damaged: the end of the log or the ledger of the archive cannot be read.
        """
        renamed = list(released)
        raw = {segment.base_sequence for segment in renamed if segment.kind.form is Kind.RAW}
        sealing = find_being_sealed(self._root, raw) if raw else set()
        claims, _ = self._read_claims()
        decisions = []
        for segment in renamed:
            base, recorded = segment.base_sequence, self._recorded.get(segment.base_sequence)
            gives_up = recorded is not None and recorded.lost  # which must be counted again
            passes = base in self._passed and not gives_up and not self._limits.require_archived
            with suppress(FileNotFoundError):  # deleted in between, and this is a dry run
                taken = segment.kind.form is Kind.RAW and segment.base_sequence in sealing
                decisions.append(self._confirm(segment, None if passes else claims, now_ns, sealing=taken))
        return decisions

    def decisions(self, *, now_ns: int) -> Iterator[Decision]:
        """One for every segment that is sealed, or has waited for the sealer for a while; oldest first.

        Raises:
            Damaged: the directory, the end of the log or the ledger of the archive cannot be read.
        """
        view = read_view(self._root, self.log_id)
        listing = self._contents.take_in(view.listing)
        left = self._waiting.left(view.bound, listing)
        complete = [s for s in listing.segments if s.kind is Kind.SEALED or s.base_sequence in left]
        bases = {segment.base_sequence for segment in complete}
        if self._limits.by_age:
            self._ages.learn(bases)
        claims, due = self._read_claims()
        sealing = find_being_sealed(self._root, [s.base_sequence for s in complete if s.kind is Kind.RAW])
        raw_released = {segment.base_sequence for segment in listing.released if segment.kind.form is Kind.RAW}
        self._known = {base: known for base, known in self._known.items() if base in bases}
        waiting: list[tuple[Segment, Known, int, int]] = []
        newer_bytes = newer_records = 0
        for segment in reversed(complete):
            known = self._learn(segment)
            if known is None:
                continue  # deleted in between
            waiting.append((segment, known, newer_bytes, newer_records))
            newer_bytes += known.stored_bytes
            newer_records += known.records
        self._routes.count([(segment, known.stored_bytes) for segment, known, _, _ in waiting], self._contents.routes)
        while waiting:
            if self._clock() >= due:
                claims, due = self._read_claims()
            segment, known, newer_bytes, newer_records = waiting.pop()
            with suppress(FileNotFoundError):  # deleted in between
                index = None if known.opened else self._open(segment, known)
                facts = Facts(
                    age_ns=self._ages.at_least_ns(segment.base_sequence) if self._limits.by_age else 0,
                    stored_bytes=known.stored_bytes,
                    records=known.records,
                    newer_bytes=newer_bytes,
                    newer_records=newer_records,
                    archived=True,
                    newest=segment is listing.segments[-1],
                    sealing=self._in_both_forms(segment)
                    or segment.base_sequence in (sealing if segment.kind is Kind.RAW else raw_released),
                    readable=not known.problem,
                )
                yield self._decide(segment, known, index, facts, claims, now_ns)

    def _in_both_forms(self, segment: Segment) -> bool:
        """Whether the raw form of a sealed segment still exists, because the sealer has not finished."""
        return segment.kind is Kind.SEALED and self._root.segment(segment.base_sequence, Kind.RAW).exists()

    def _read_claims(self) -> tuple[CursorSnapshot, float]:
        """The claims of the cursors now, and when to read them again."""
        began = self._clock()
        claims = read_cursor_snapshot(self._root, log_id=self.log_id)
        if not claims.pins_nothing_new(self._claims):
            self._passed.clear()
        self._claims = claims
        self.troubles = [*claims.problems(), *([self._ages.trouble] if self._ages.trouble else [])]
        return claims, began + max(CLAIMS_SECONDS, _CLAIMS_SHARE * (self._clock() - began))

    def _decide(
        self,
        segment: Segment,
        known: Known,
        index: SealedIndex | None,
        facts: Facts,
        claims: CursorSnapshot,
        now_ns: int,
    ) -> Decision:
        """The decision by the index, which is read here if it is not given and the verdict depends on it."""
        recorded = self._recorded.get(segment.base_sequence)
        withdrawal = None
        if recorded is not None and recorded.form is not segment.kind.form:
            # It does not say what the sealed form is, nor how many bytes go with it.
            recorded, withdrawal = None, self.kept(segment, SEALED_SINCE, now_ns)
        log = over(facts, self._limits)
        concerned = self._routes.concerns(segment.base_sequence, facts.age_ns, log)
        # As far as is known without opening it:
        verdict = judge(facts, self._limits, [Verdict.EACH_ROUTE if concerned else log or Verdict.READ])
        pin: Pin | None = None
        entry: Entry | None = None
        excuse: Excuse | None = None
        if verdict.goes:
            try:
                verdict, entry, excuse = self._judge_opened(
                    segment, known, index, facts, claims, now_ns, recorded=recorded is not None
                )
                pin = known.pin
            except (Unreadable, BadSealed) as error:  # readable in an earlier pass, or the loss cannot be counted
                known.problem = str(error)
                verdict = Verdict.UNREADABLE
        if recorded is not None and not verdict.goes:
            entry = self.kept(segment, verdict.value, now_ns)
        message = known.problem or known.damage
        unneeded = verdict is Verdict.UNREAD and judge(facts, self._limits, [log or Verdict.READ]).goes
        return Decision(
            segment,
            verdict,
            known.stored_bytes,
            pin,
            entry,
            message,
            withdrawal,
            alone=pin is not None and known.other is None,
            shrinkable=unneeded and segment.kind is Kind.SEALED and not known.damage,
            excuse=excuse,
        )

    def _confirm(self, segment: Segment, claims: CursorSnapshot | None, now_ns: int, *, sealing: bool) -> Decision:
        """The decision about a released segment under ``claims``; None: no cursor holds it back."""
        base = segment.base_sequence
        stored_bytes, recorded = segment.path.stat().st_size, self._recorded.get(base)
        try:
            require_matching_name(segment, self.log_id)
        except Misplaced as error:  # the ledger's line is about another file
            return Decision(segment, Verdict.UNREADABLE, stored_bytes, message=str(error), stays=True)
        verdict = recorded.verdict if recorded is not None else Verdict.READ
        pin, entry, message = None, None, ""
        if sealing:
            verdict = Verdict.SEALING
        elif claims is not None and not self._is_sealed(base):
            try:
                verdict, pin, entry = self._confirm_opened(segment, verdict, recorded, claims, now_ns)
            except Unreadable as error:
                verdict, message = Verdict.UNREADABLE, str(error)
        if recorded is not None and not verdict.goes:
            entry = self.kept(segment, verdict.value, now_ns)
        elif recorded is None and verdict.goes:
            entry = self._stamped(unexplained_entry(base, self._contents.last(segment), now_ns))
        withdrawal = None
        if recorded is not None and verdict.goes and entry is not None:
            withdrawal = self.kept(segment, COUNTED_AGAIN, now_ns)
        return Decision(segment, verdict, stored_bytes, pin, entry, message, withdrawal)

    def _is_sealed(self, base: int) -> bool:
        """Return True if the name of the sealed form exists and is that form of the segment."""
        sealed = Segment(base, Kind.SEALED, self._root.segment(base, Kind.SEALED))
        try:
            require_matching_name(sealed, self.log_id)
        except (FileNotFoundError, Misplaced):
            return False
        return True

    def _confirm_opened(
        self, segment: Segment, verdict: Verdict, recorded: Recorded | None, claims: CursorSnapshot, now_ns: int
    ) -> tuple[Verdict, Pin | None, Entry | None]:
        """The verdict by the segment's index; and a new line if it is deleted now, and what is lost has changed."""
        index = self._contents.index(segment)
        pins = list(claims.pins(self._contents.needs(segment, index)))
        lost = recorded.lost if recorded is not None else {}
        if pin := next((each for each in pins if each.route not in lost or not self._limits.loses(each.route)), None):
            return Verdict.UNREAD, pin, None
        if not self._archived(index, claims):
            return Verdict.NOT_ARCHIVED, None, None
        if not pins:
            self._passed.add(segment.base_sequence)
        entry = None
        unread = unread_records(index, claims)
        if recorded is not None and segment.kind is segment.kind.deleting and unread != lost:
            rules = {entry.route: recorded.rules.get(entry.route, Verdict.READ) for entry in index.routes}
            stored_bytes = segment.path.stat().st_size
            entry = self._reclaimed(segment, index, claims, verdict, rules, unread, stored_bytes, now_ns)
        return verdict, None, entry

    def _judge_opened(
        self,
        segment: Segment,
        known: Known,
        index: SealedIndex | None,
        facts: Facts,
        claims: CursorSnapshot,
        now_ns: int,
        *,
        recorded: bool,
    ) -> tuple[Verdict, Entry | None, Excuse | None]:
        """The verdict by the segment's index; and the line for the ledger, if it goes and has none yet.

        The excuse is what the line leaves to another one.
        """
        base, log = segment.base_sequence, over(facts, self._limits)
        if known.pin is not None and all(
            claims.still_pins(pin) and not self._routes.may_let_go(pin.route, base, facts.age_ns, log)
            for pin in (known.pin, known.other)
            if pin is not None
        ):
            return Verdict.UNREAD, None, None
        index = index or self._contents.index(segment)
        pins, rules = self._judge_routes(segment, index, facts.age_ns, claims, log)
        known.pin, known.other = _of_two_routes(pin for pin in pins if rules[pin.route] is Verdict.UNREAD)
        verdict = judge(replace(facts, archived=self._archived(index, claims)), self._limits, rules.values())
        if verdict.goes and not pins and claims is self._claims:
            self._passed.add(base)
        if not verdict.goes or recorded:
            return verdict, None, None
        if self._verify and segment.kind is Kind.SEALED:
            index, damage = damaged_frames(segment, index)
            known.damage = damage or known.damage
        lost = unread_records(index, claims) if pins else {}
        sharing = verdict is not Verdict.EACH_ROUTE and not lost and may_share(segment, index)
        excuse = Excuse(index.routes, claims) if sharing else None
        entry = self._reclaimed(
            segment, index, claims, verdict, rules, lost, known.stored_bytes, now_ns, listed=excuse is None
        )
        return verdict, entry, excuse

    def _judge_routes(
        self, segment: Segment, index: SealedIndex, age_ns: int, claims: CursorSnapshot, log: Verdict | None
    ) -> tuple[list[Pin], dict[str, Verdict]]:
        """The groups that have not read the segment, and the verdict of each route in it.

        Where no route has a limit that counts, the groups of two routes are enough.
        """
        needed = self._contents.needs(segment, index)
        if not self._routes.concerns(segment.base_sequence, age_ns, log):
            pins = [pin for pin in _of_two_routes(claims.pins(needed)) if pin is not None]
            unread = log if log is not None and self._limits.others.expire else Verdict.UNREAD
            return pins, {pin.route: unread for pin in pins} or {"": log or Verdict.READ}
        pins = list(claims.pins(needed))
        counted = unread_records(index, claims)
        unread_by_route = {pin.route: counted.get(pin.route, 0) for pin in pins}
        return pins, self._routes.verdicts(segment.base_sequence, age_ns, log, needed, unread_by_route)

    def _reclaimed(
        self,
        segment: Segment,
        index: SealedIndex,
        claims: CursorSnapshot,
        verdict: Verdict,
        rules: Mapping[str, Verdict],
        lost: Mapping[str, int],
        stored_bytes: int,
        now_ns: int,
        *,
        listed: bool = True,
    ) -> Entry:
        """The line of a deletion; unless its routes are ``listed``, the caller has the excuse for a shared line."""
        by_route = rules if verdict is Verdict.EACH_ROUTE else {}
        routes = self._excuses.text(index.routes, claims, by_route) if listed else None
        return self._stamped(reclaimed_entry(segment, index, verdict, routes, lost, stored_bytes, now_ns))

    def _stamped(self, entry: Entry) -> Entry:
        """A line with the moment of this boot, by which the grace period is measured."""
        return entry | self._moment().as_entry()

    def _archived(self, index: SealedIndex, claims: CursorSnapshot) -> bool:
        return not self._limits.require_archived or self._contents.all_archived(index, claims.retired)

    def _learn(self, segment: Segment) -> Known | None:
        """What is kept of a segment; a segment that could not be read is tried again in each pass."""
        known = self._known.get(segment.base_sequence)
        try:
            if known is None or known.problem or known.kind is not segment.kind:
                known = Known(segment.kind, segment.path.stat().st_size)
            if self._limits.max_records is not None and not known.opened:
                self._open(segment, known)
        except FileNotFoundError:
            return None
        self._known[segment.base_sequence] = known
        return known

    def _open(self, segment: Segment, known: Known) -> SealedIndex | None:
        """Read the index of a segment, and keep what a pass needs of each; None if it cannot be read."""
        try:
            index, known.damage = self._contents.index_and_damage(segment)
            self._contents.needs(segment, index)
        except Unreadable as error:
            known.opened, known.problem = True, str(error)
            return None
        known.opened = True
        dropped = index.shrunk.routes if index.shrunk is not None else ()
        known.records = index.next_sequence - index.base_sequence - sum(entry.count for entry in dropped)
        return index


def _of_two_routes(pins: Iterator[Pin]) -> tuple[Pin | None, Pin | None]:
    """The first pin, and the first of another route; None where there is none."""
    first = next(pins, None)
    return first, next((pin for pin in pins if first is not None and pin.route != first.route), None)
