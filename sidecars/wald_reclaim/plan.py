"""What is to be deleted now: a look at the directory, the cursors and the ledgers; nothing is changed.

A planner may look again and again. It keeps of each segment what never changes, and one group that held it back: as
long as that one does, the segment need not be opened, so a look costs little however many segments wait. A look at very
many takes a while; cursors are read again on the way, so that no decision rests on old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.format.names import Kind
from wald.format.sealed import BadSealed, RouteEntry, SealedIndex
from wald.store.files import uptime
from wald.store.files.directory import Listing, Root, Segment, being_sealed, list_segments
from wald.store.files.ledger import entries_of
from wald.store.files.uptime import Moment, moment_of
from wald.store.retention.cursors import CursorState
from wald.store.retention.history import Entry, History
from wald.store.retention.pins import Claims, Pin, needs, read_claims, segment_index, ways_out, with_lost
from wald.store.segments.compression import SealedFile
from wald.store.segments.head import Bound
from wald.store.segments.view import read_view
from wald_reclaim.ages import Ages
from wald_reclaim.policy import Facts, Limits, Verdict, judge

CLAIMS_SECONDS = 0.25  # old enough to be read again; a thousand cursors take about a third of it
_EXPIRING = {verdict.value: verdict for verdict in Verdict if verdict.expires}
_RAW_SECONDS = 5.0  # what the sealer does not get to in so long is read to its end here, and may go as it is
_CLAIMS_SHARE = 4  # and so many times as long as reading them took, where there are very many


@dataclass(frozen=True, slots=True)
class Decision:
    """About one complete segment.

    Attributes:
        pin: of those who hold it back, one.
        entry: what the ledger has to be told before anything is done; None: nothing, or it has been told already.
        told: whether the ledger says by now that the segment is reclaimed.
        message: what is wrong with it; "" if nothing is known to be.
    """

    segment: Segment
    verdict: Verdict
    stored_bytes: int
    pin: Pin | None = None
    entry: Entry | None = None
    told: bool = False
    message: str = ""


@dataclass(slots=True)
class _Known:
    """What is kept of a segment between two looks."""

    kind: Kind
    stored_bytes: int
    records: int
    pin: Pin | None = None
    problem: str = ""
    damage: str = ""
    """What is wrong with its index, where it is known all the same what it held."""


class _Unreadable(Exception):
    """A segment of which nobody can say what it holds: it stays, and the others go on."""


class Planner:
    """Looks at ``root`` for one process.

    Args:
        verify: whether the frames of a sealed segment are read before it goes, and its line tells of damage in them.

    Attributes:
        troubles: what is wrong with cursors, as of the last look.
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
        self._log_id = log_id
        self._verify = verify
        self._clock = clock
        self._moment = moment
        self._ages = Ages(root, moment)
        self._history = History(root)
        self._known: dict[int, _Known] = {}
        self._raw_since: dict[int, float] | None = None
        """When raw segments were first seen; None: not at all, so whatever is there has been there for a while."""
        self.troubles: list[str] = []
        self._successors: dict[int, int] = {}
        """Of each segment, the base of the one behind it."""
        self._told: dict[int, Entry] = {}
        """Of segments still there of which the ledger says that they are reclaimed: the rule, and since when."""
        self._passed: dict[int, Claims] = {}
        """Of segments that go: claims under which they do."""
        listing = self._list()
        there = {segment.base_sequence for segment in (*listing.segments, *listing.released)}
        for entry in entries_of(root.ledger / "reclaim.jsonl"):
            self.heard(entry)
        self._told = {base: entry for base, entry in self._told.items() if base in there}

    def heard(self, entry: Entry) -> None:
        """The ledger says this."""
        self._ages.hear(entry)
        base = entry.get("base")
        if isinstance(base, int) and entry.get("event") == "reclaimed":
            moment = {"boot": entry.get("boot"), "boottime": entry.get("boottime")}
            self._told[base] = {"rule": str(entry.get("rule"))} | moment  # and not a thousand routes
        elif isinstance(base, int):
            self._told.pop(base, None)

    def witness(self, *, now_ns: int) -> Entry | None:
        """What the ledger has to be told so that ages are known later; None: nothing, or nobody asks for ages."""
        complete = list_segments(self._root).segments[:-1]
        if not complete or not self._limits.by_age:
            return None
        return self._ages.witness(complete[-1].base_sequence, now_ns=now_ns)

    def gone(self, segment: Segment) -> None:
        """The file is deleted."""
        self._told.pop(segment.base_sequence, None)
        self._passed.pop(segment.base_sequence, None)

    def released(self) -> tuple[Segment, ...]:
        """The segments that are reclaimed and still there, oldest first."""
        return self._list().released

    def waited(self, released: Iterable[Segment], *, grace_ns: int) -> list[Segment]:
        """Those that have waited long enough since the ledger was told; no reader outlives the boot it began in."""
        now = self._moment()
        waited = []
        for segment in released:
            since = moment_of(self._told.get(segment.base_sequence, {}))
            over = grace_ns == 0 or (
                since is not None and (now.boot != since.boot or now.boottime_ns - since.boottime_ns >= grace_ns)
            )
            if over or segment.kind is segment.kind.deleting:
                waited.append(segment)
        return waited

    def again(self, released: Iterable[Segment], *, now_ns: int) -> list[Decision]:
        """What is to become of segments whose names say that they are reclaimed; the cursors are read after that.

        Only what may have turned against it since is asked: whether somebody needs it, and whether it is archived.

        Raises:
            Damaged: the end of the log or the ledger of the archive cannot be read.
        """
        renamed = list(released)
        sealing = being_sealed(self._root) if any(s.kind.form is Kind.RAW for s in renamed) else set()
        claims, _ = self._read_claims()
        lets_go: dict[int, bool] = {}  # by the identity of earlier claims, of which there are few
        decisions = []
        for segment in renamed:
            earlier = self._passed.get(segment.base_sequence)
            if earlier is not None and id(earlier) not in lets_go:
                lets_go[id(earlier)] = claims.lets_go(earlier)
            raw = segment.kind.form is Kind.RAW
            passes = earlier is not None and lets_go[id(earlier)] and not self._limits.require_archived
            with suppress(FileNotFoundError):  # gone meanwhile, and this is a dry run
                taken = raw and segment.base_sequence in sealing
                decisions.append(self._decide_again(segment, None if passes else claims, now_ns, sealing=taken))
        return decisions

    def decisions(self, *, now_ns: int) -> Iterator[Decision]:
        """One about every segment that is sealed, or has waited for the sealer for a while, oldest first.

        Raises:
            Damaged: the directory, the end of the log or the ledger of the archive cannot be read.
        """
        view = read_view(self._root, self._log_id)
        listing = view.listing
        self._successors = listing.successors()
        left = self._left_raw(view.bound, listing)
        complete = [s for s in listing.segments if s.kind is Kind.SEALED or s.base_sequence in left]
        bases = {segment.base_sequence for segment in complete}
        if self._limits.by_age:
            self._ages.learn(bases)
        claims, due = self._read_claims()
        sealing = being_sealed(self._root)
        self._known = {base: known for base, known in self._known.items() if base in bases}
        waiting: list[tuple[Segment, _Known, int, int]] = []
        newer_bytes = newer_records = 0
        for segment in reversed(complete):
            known = self._learn(segment, claims)
            if known is None:
                continue  # gone meanwhile
            waiting.append((segment, known, newer_bytes, newer_records))
            newer_bytes += known.stored_bytes
            newer_records += known.records
        while waiting:
            if self._clock() >= due:
                claims, due = self._read_claims()
            segment, known, newer_bytes, newer_records = waiting.pop()
            facts = Facts(
                age_ns=self._ages.at_least_ns(segment.base_sequence) if self._limits.by_age else 0,
                stored_bytes=known.stored_bytes,
                records=known.records,
                newer_bytes=newer_bytes,
                newer_records=newer_records,
                read=True,
                archived=True,
                newest=segment is listing.segments[-1],
                sealing=self._in_both_forms(segment) or (segment.kind is Kind.RAW and segment.base_sequence in sealing),
                readable=not known.problem,
            )
            with suppress(FileNotFoundError):  # gone meanwhile
                yield self._decide(segment, known, facts, claims, now_ns)

    def _left_raw(self, bound: Bound, listing: Listing) -> set[int]:
        """The raw segments that are complete, and that the sealer has left as they are for a while.

        A start of the daemon reads in the segment of the head what of its pipes is in the log, and moves the head then.
        """
        raw = [segment.base_sequence for segment in listing.segments[:-1] if segment.kind is Kind.RAW]
        cut = [base for base in raw if base < bound.segment]
        now = self._clock()
        if self._raw_since is None:
            self._raw_since = dict.fromkeys(cut, now - _RAW_SECONDS)
        self._raw_since = {base: self._raw_since.get(base, now) for base in cut}
        return {base for base, since in self._raw_since.items() if now - since >= _RAW_SECONDS}

    def _in_both_forms(self, segment: Segment) -> bool:
        """Whether the sealer is not done with a sealed segment."""
        return segment.kind is Kind.SEALED and self._root.segment(segment.base_sequence, Kind.RAW).exists()

    def _unexplained(self, segment: Segment, now_ns: int) -> Entry:
        """The ledger's line about a released segment of which it does not tell."""
        try:
            index = self._index(segment)
        except _Unreadable:
            last = segment.base_sequence
        else:
            last = index.next_sequence - 1
        base = segment.base_sequence
        line = {
            "event": "reclaimed",
            "base": base,
            "last": last,
            "rule": "found released, reason unknown",
            "at": now_ns,
        }
        return line | self._moment().told()

    def _kept(self, segment: Segment, verdict: Verdict, now_ns: int) -> Entry:
        """The ledger's line: what it has told of a segment is not, or not any more, what will be done."""
        line = {"event": "kept", "base": segment.base_sequence, "why": verdict.value, "at": now_ns}
        return line | self._moment().told()

    def _read_claims(self) -> tuple[Claims, float]:
        """The cursors as they are now, and when they are to be read again."""
        began = self._clock()
        claims = read_claims(self._root, log_id=self._log_id)
        self.troubles = [*_troubles(claims), *([self._ages.trouble] if self._ages.trouble else [])]
        return claims, began + max(CLAIMS_SECONDS, _CLAIMS_SHARE * (self._clock() - began))

    def _decide(self, segment: Segment, known: _Known, facts: Facts, claims: Claims, now_ns: int) -> Decision:
        told = segment.base_sequence in self._told
        verdict = judge(facts, self._limits)
        pin: Pin | None = None
        entry: Entry | None = None
        if verdict.goes:  # as far as can be told without opening it
            try:
                verdict, entry = self._judge_opened(segment, known, facts, claims, now_ns, told=told)
                pin = known.pin
            except (_Unreadable, BadSealed) as error:  # good at an earlier look, or what is lost cannot be counted
                known.problem = str(error)
                verdict = Verdict.UNREADABLE
        if told and not verdict.goes:
            entry = self._kept(segment, verdict, now_ns)
        message = known.problem or known.damage
        return Decision(segment, verdict, known.stored_bytes, pin, entry, told, message)

    def _decide_again(self, segment: Segment, claims: Claims | None, now_ns: int, *, sealing: bool) -> Decision:
        """The verdict on a released segment under ``claims``; None: under these nobody holds it back."""
        base = segment.base_sequence
        stored_bytes, told = segment.path.stat().st_size, self._told.get(base)
        pin, verdict, message = None, _EXPIRING.get(told["rule"] if told else "", Verdict.READ), ""
        if sealing:
            verdict = Verdict.SEALING
        elif claims is not None and not self._root.segment(base, Kind.SEALED).exists():
            try:
                index = self._index(segment)
                pin = next(claims.pins(self._needs(segment, index)), None)
            except _Unreadable as error:
                verdict, message = Verdict.UNREADABLE, str(error)
            else:
                if pin is not None and not (self._limits.expire and verdict.expires):
                    verdict = Verdict.UNREAD
                elif not self._archived(segment, index, claims):
                    verdict = Verdict.NOT_ARCHIVED
                elif pin is None:
                    self._passed[base] = claims
        entry: Entry | None = None
        if told is not None and not verdict.goes:
            entry = self._kept(segment, verdict, now_ns)
        elif told is None and verdict.goes:
            entry = self._unexplained(segment, now_ns)
        return Decision(segment, verdict, stored_bytes, pin, entry, told is not None, message)

    def _judge_opened(
        self, segment: Segment, known: _Known, facts: Facts, claims: Claims, now_ns: int, *, told: bool
    ) -> tuple[Verdict, Entry | None]:
        """The verdict with what only the segment's index tells; and the ledger's line, if it goes and was not told."""
        index = None
        if known.pin is None or not claims.still(known.pin):
            index = self._index(segment)
            known.pin = next(claims.pins(self._needs(segment, index)), None)
        facts = replace(facts, read=known.pin is None, archived=self._archived(segment, index, claims))
        verdict = judge(facts, self._limits)
        if verdict.goes and known.pin is None:
            self._passed[segment.base_sequence] = claims
        if not verdict.goes or told:
            return verdict, None
        index = index or self._index(segment)
        if self._verify and segment.kind is Kind.SEALED:
            index, words = _verified(segment, index)
            known.damage = words or known.damage
        line = _reclaimed(segment, index, claims, verdict, known.stored_bytes, now_ns)
        return verdict, line | self._moment().told()

    def _archived(self, segment: Segment, index: SealedIndex | None, claims: Claims) -> bool:
        if not self._limits.require_archived:
            return True
        routes = (index or self._index(segment)).routes
        return all(
            self._history.all_archived(entry.route, entry.first, entry.last)
            for entry in routes
            if entry.route not in claims.retired
        )

    def _list(self) -> Listing:
        listing = list_segments(self._root)
        self._successors = listing.successors()
        return listing

    def _needs(self, segment: Segment, index: SealedIndex) -> list[RouteEntry]:
        """What it takes to let a segment go."""
        try:
            return needs(index, self._successors.get(index.base_sequence, index.next_sequence), self._history)
        except BadSealed as error:
            raise _Unreadable(f"{segment.path}: it is damaged: {error}; {ways_out(segment)}") from error

    def _index(self, segment: Segment, known: _Known | None = None) -> SealedIndex:
        damage: list[Damaged] = []
        try:
            index = segment_index(segment, self._log_id, on_damage=damage.append)
            for error in damage:
                index = with_lost(index, segment, self._successors.get(segment.base_sequence), self._history, error)
        except Damaged as error:
            raise _Unreadable(f"{error.message}; {error.hint}") from error
        if damage and known is not None:
            source = "its frames tell what it holds" if index.sha256 else "segments.jsonl tells what it held"
            known.damage = f"{damage[0].message}; {source}"
        return index

    def _learn(self, segment: Segment, claims: Claims) -> _Known | None:
        """What is kept of a segment; one that could not be read is tried again each time."""
        known = self._known.get(segment.base_sequence)
        if known is not None and not known.problem and known.kind is segment.kind:
            return known
        try:
            known = _Known(segment.kind, segment.path.stat().st_size, 0)
            try:
                index = self._index(segment, known)
                known.pin = next(claims.pins(self._needs(segment, index)), None)
            except _Unreadable as error:
                known.problem = str(error)
            else:
                known.records = index.next_sequence - index.base_sequence
        except FileNotFoundError:
            return None
        self._known[segment.base_sequence] = known
        return known


def _reclaimed(
    segment: Segment, index: SealedIndex, claims: Claims, verdict: Verdict, stored_bytes: int, now_ns: int
) -> Entry:
    """The ledger's line: what is deleted, by which rule, and how far everybody was that it concerns."""
    routes: list[Entry] = []
    for entry in index.routes:
        told: Entry = {"route": entry.route, "count": entry.count, "first": entry.first, "last": entry.last}
        retired = entry.route in claims.retired
        routes.append(told | ({"retired": True} if retired else {"cursors": claims.vector(entry.route)}))
    line: Entry = {
        "event": "reclaimed",
        "base": index.base_sequence,
        "last": index.next_sequence - 1,
        "at": now_ns,
        "rule": verdict.value,
        "bytes": stored_bytes,
        **_told_of_form(segment, index),
        "routes": routes,
    }
    if lost := _lost(index, claims):
        line["lost"] = lost
    if index.damage:
        line["damaged"] = True
        line["damaged_bytes"] = sum(length for _, length in index.damage)
    return line


def _told_of_form(segment: Segment, index: SealedIndex) -> Entry:
    """Of a sealed one the digest, if it is known; of one that was never sealed what no line of the sealer tells."""
    if segment.kind.form is Kind.SEALED:
        return {"sha256": index.sha256.hex()} if index.sha256 else {}
    (frame,) = index.frames
    return {"form": "raw", "earliest": frame.earliest_ns, "latest": frame.latest_ns}


def _verified(segment: Segment, index: SealedIndex) -> tuple[SealedIndex, str]:
    """The index with what of the frames is not as it was sealed, and that in words; "" if all of them are."""
    try:
        sealed = SealedFile(segment.path)
    except Damaged:
        return index, ""  # which was made of the frames
    with sealed:
        found = sealed.damage()
    if not found:
        return index, ""
    spoilt = [(frame.raw_offset, frame.raw_bytes) for frame, _ in found if not index.is_damage(frame)]
    first, error = found[0]
    more = f", and {len(found) - 1} frames more" if len(found) > 1 else ""
    words = f"{error.message}: records {first.first_sequence} to {first.next_sequence - 1}{more}"
    return replace(index, damage=sorted([*index.damage, *spoilt])), words


def _lost(index: SealedIndex, claims: Claims) -> dict[str, int]:
    """Per route the records that the slowest group has not read."""
    slowest: dict[int, int] = {}
    for pin in claims.pins(index.routes):
        number = next(i for i, entry in enumerate(index.routes) if entry.route == pin.route)
        slowest[number] = min(pin.at, slowest.get(number, pin.at))
    if not slowest:
        return {}
    read = dict.fromkeys(slowest, 0)
    table = index.batch_table()
    for route, base, count in zip(table.routes, table.bases, table.counts, strict=True):
        if route in slowest:
            read[route] += max(0, min(count, slowest[route] + 1 - base))
    # Of a damaged one there are fewer batches than records: what cannot be found is unread as far as anybody knows.
    held = {number: index.routes[number] for number in slowest}
    return {entry.route: min(entry.count - read[n], entry.last - slowest[n]) for n, entry in held.items()}


def _troubles(claims: Claims) -> list[str]:
    """What is wrong with cursors that gate; an absent one is a choice."""
    return [
        cursor.message
        for route, cursors in claims.cursors.items()
        if route not in claims.retired
        for cursor in cursors
        if cursor.state not in (CursorState.VALID, CursorState.ABSENT)
    ]
