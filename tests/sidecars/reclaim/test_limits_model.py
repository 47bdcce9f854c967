"""Random histories of a log with limits, quotas and shrinks, compared with a model in plain lists.

The model is written from ``docs/retention.md`` without code of wald-reclaim, and keeps nothing between passes. It tells
which segments go, which records are lost, and what is left of a shrunk segment. Limits are drawn at the actual values,
or one below. The log is real. Either one process makes all passes, and its limits change between them, or each pass is
a separate process. The machine reboots, and passes die at any step of the disk; the model then continues from the
files. In some histories segments share a line of the ledger, as those with many routes do.
"""

import shutil
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults import Died, DyingDisk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from logs import SECOND_NS, Built
from reclaiming import Reclaimer, bases, ledger

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.files.routes import add_route, retire_route
from wald.files.uptime import Moment, parse_moment
from wald.format.ledger_lines import Entry
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.retention.audit import audit_deletion, audit_shrink
from wald.retention.history import History
from wald_reclaim.evidence import LISTED_MAX
from wald_reclaim.policy import Limits, RouteLimits

Record = tuple[int, str, int]
"""Its sequence, its route, and the bytes of its payload."""
Batches = list[list[Record]]


@dataclass
class OnRecord:
    """Last ledger line about a segment's deletion: its time, and the routes that lose unread records."""

    since: Moment
    losing: frozenset[str]


@dataclass
class Held:
    """A sealed segment.

    Attributes:
        batches: each of one route; shrinking drops whole ones.
        whole: the batches of its old form, which an interrupted shrink has left in addition to the new one.
        recorded: the ledger line of a deletion that was interrupted before the rename.
    """

    base: int
    batches: Batches
    stored_bytes: int
    whole: Batches | None = None
    recorded: OnRecord | None = None

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]

    def of(self, route: str) -> list[Record]:
        return [record for record in self.records if record[1] == route]

    def routes(self) -> list[str]:
        return sorted({route for _, route, _ in self.records})


@dataclass
class Released:
    """A segment in its grace period."""

    held: Held
    line: OnRecord
    deleting: bool = False


@dataclass
class Model:
    """The log as lists."""

    complete: list[Held] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    """Routes without a directory."""
    archived: dict[str, int] = field(default_factory=dict)
    """Up to which record each route is in bundles."""
    lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost records of each deleted segment."""
    ages_ns: dict[int, int] = field(default_factory=dict)
    """Age of each segment that the ledgers prove now."""

    def floor(self, route: str) -> int:
        """Return the last record of a route that every group has read."""
        if route in self.retired:
            return 1 << 64
        return min((at for (of, _), at in self.cursors.items() if of == route and route not in self.gone), default=0)

    def unread(self, held: Held, route: str) -> int:
        """Return the records of a route that at least one group has not read."""
        return sum(sequence > self.floor(route) for sequence, _, _ in held.of(route))

    def unread_routes(self, held: Held) -> dict[str, int]:
        return {route: unread for route in held.routes() if (unread := self.unread(held, route))}

    def newer(self, held: Held) -> list[Held]:
        return [other for other in self.complete if other.base > held.base]

    def in_bundles(self, records: Iterable[Record]) -> bool:
        return all(
            sequence <= self.archived.get(route, 0) for sequence, route, _ in records if route not in self.retired
        )

    def goes(self, held: Held, limits: Limits) -> bool:
        """Return True if every route agrees, and no minimum retention keeps its read records."""
        answers = [self.answer(held, route, limits) for route in held.routes()]
        if limits.require_archived and not self.in_bundles(held.records):
            return False
        return "needed" not in answers and ("read" not in answers or not self.is_kept(held, limits))

    def is_kept(self, held: Held, limits: Limits) -> bool:
        """Return True if it is young, or within the newest bytes."""
        young = limits.min_age_ns is not None and self.ages_ns[held.base] < limits.min_age_ns
        newer_bytes = sum(other.stored_bytes for other in self.newer(held))
        return young or (limits.keep_bytes is not None and newer_bytes < limits.keep_bytes)

    def is_beyond_the_log(self, held: Held, limits: Limits) -> bool:
        """Return True if it is beyond a limit of the whole log."""
        from_it_on = [held, *self.newer(held)]
        return any(
            limit is not None and there > limit
            for there, limit in [
                (self.ages_ns[held.base], limits.max_age_ns),
                (sum(other.stored_bytes for other in from_it_on), limits.max_bytes),
                (sum(len(other.records) for other in from_it_on), limits.max_records),
            ]
        )

    def answer(self, held: Held, route: str, limits: Limits) -> str:
        """Return the answer of a route: "needed", "read", or "beyond"."""
        own = limits.of(route)
        newer = [record for other in self.newer(held) for record in other.of(route)]
        beyond = self.is_beyond_the_log(held, limits) or any(
            limit is not None and there > limit
            for there, limit in [
                (self.ages_ns[held.base], own.max_age_ns),
                (sum(size for _, _, size in newer + held.of(route)), own.max_bytes),
                (len(newer) + len(held.of(route)), own.max_records),
            ]
        )
        unread = self.unread(held, route)
        if not unread:
            return "beyond" if beyond else "read"
        if beyond and own.expire:
            return "beyond"
        share = sum(size for _, _, size in held.of(route)) * unread // len(held.of(route))
        unread_bytes = sum(size for _, _, size in newer) + share
        return "beyond" if own.pinned_max_bytes is not None and unread_bytes > own.pinned_max_bytes else "needed"

    def look(self, limits: Limits, now: Moment, grace_ns: int, *, compact: bool) -> list[tuple[Held, list[Batches]]]:
        """Make a pass; return the segments to shrink, each with its possible results."""
        self.finish_shrinks()
        going = [held for held in self.complete if self.goes(held, limits)]
        shrinkable = [held for held in self.complete if held not in going and self.is_shrinkable(held, limits)]
        for held in self.complete:
            line = held.recorded or OnRecord(now, frozenset(self.unread_routes(held)))
            held.recorded = None
            if held in going:
                self.released.append(Released(held, line))
        self.complete = [held for held in self.complete if held not in going]
        for waiting in list(self.released):
            self.look_again(waiting, limits, now, grace_ns)
        return [(held, self.shrinks(held, limits)) for held in shrinkable] if compact else []

    def look_again(self, waiting: Released, limits: Limits, now: Moment, grace_ns: int) -> None:
        """Restore a released segment, delete it, or let it wait."""
        unread, line = self.unread_routes(waiting.held), waiting.line
        archived = not limits.require_archived or self.in_bundles(waiting.held.records)
        if not archived or not all(route in line.losing and limits.may_lose(route) for route in unread):
            self.released.remove(waiting)
            self.complete = sorted([*self.complete, waiting.held], key=lambda held: held.base)
        elif waiting.deleting or now.boot != line.since.boot or now.boottime_ns - line.since.boottime_ns >= grace_ns:
            self.released.remove(waiting)
            self.lost[waiting.held.base] = unread

    def finish_shrinks(self) -> None:
        """Finish an interrupted shrink unless a group needs a dropped record."""
        for held in self.complete:
            if held.whole is not None:
                dropped = [batch for batch in held.whole if batch not in held.batches]
                if any(batch[-1][0] > self.floor(batch[0][1]) for batch in dropped):
                    held.batches = held.whole
                held.whole = None

    def is_shrinkable(self, held: Held, limits: Limits) -> bool:
        """Return True if only unread records pin it."""
        if not any(self.answer(held, route, limits) == "needed" for route in held.routes()):
            return False
        return self.is_beyond_the_log(held, limits) or not self.is_kept(held, limits)

    def shrinks(self, held: Held, limits: Limits) -> list[Batches]:
        """Return the possible results: two if a cursor is between two records of an archived route."""
        return [self.shrink(held, limits, between=between) for between in (True, False)]

    def shrink(self, held: Held, limits: Limits, *, between: bool) -> Batches:
        """Return the result; ``between`` counts the position of a cursor as a record."""
        left = []
        for route in held.routes():
            records, floor = held.of(route), min(self.floor(route), held.of(route)[-1][0])
            due = max((sequence for sequence, _, _ in records if sequence <= floor), default=0)
            waits = limits.require_archived and route not in self.retired and due > 0
            if waits and self.archived.get(route, 0) < (floor if between else due):
                floor = 0
            left += [batch for batch in held.batches if batch[0][1] == route and batch[-1][0] > floor]
        left.sort()
        return left if self.pays(held, left) else held.batches

    def pays(self, held: Held, left: Batches) -> bool:
        """Return True if it frees half of the file and 16 KiB, estimated from the share of each route's records."""
        total = sum(size for _, _, size in held.records)
        stays = 0
        for route in held.routes():
            kept = sum(len(batch) for batch in left if batch[0][1] == route)
            stays += sum(size for _, _, size in held.of(route)) * kept // len(held.of(route))
        going = total - stays
        return 2 * going >= total and going * held.stored_bytes >= total * 16384


def proven_age_ns(base: int, sealed: list[dict[str, Any]], own: list[dict[str, Any]], now: Moment) -> int:
    """Return the longer age of the segment that the two ledgers prove."""

    def shows(line: dict[str, Any]) -> bool:
        if line["event"] == "seen":
            return bool(line["through"] >= base)
        return bool(line["event"] == "sealed" and line["base"] == base)

    return max(_passed([line for line in lines if "boot" in line], shows, now) for lines in (sealed, own))


def _passed(lines: list[dict[str, Any]], shows: Any, now: Moment) -> int:
    first = next((number for number, line in enumerate(lines) if shows(line)), None)
    if first is None:
        return 0
    moments = [Moment(line["boot"], line["boottime"]) for line in lines[first:]]
    return sum(
        later.boottime_ns - earlier.boottime_ns
        for earlier, later in zip(moments, [*moments[1:], now], strict=True)
        if earlier.boot == later.boot
    )


ROUTES = ["a", "b", "c"]
GROUPS = ["processed", "audit"]
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=3)
CONTENTS = st.lists(st.tuples(st.sampled_from(ROUTES), SIZES), min_size=1, max_size=3)
UNITS = st.sampled_from([1, 8192, 8192])  # bytes; shrinking must free 16 KiB
GRACES = st.sampled_from([0, 4 * SECOND_NS])
routes, groups = st.sampled_from(ROUTES), st.sampled_from(GROUPS)


class DyingInShrink(DyingDisk):
    """Disk that dies at a step counted from the first shrink."""

    begun = False

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        self.begun = self.begun or (path is not None and ".shrunk" in path.name)
        if self.begun:
            super().step(name, path, descriptor)


class Histories(RuleBasedStateMachine):
    """The log, and the model of it."""

    @initialize(
        stays=st.booleans(),
        listed_max=st.sampled_from([0, LISTED_MAX]),
        stuck=st.sampled_from([*ROUTES, ""]),
        segments=st.lists(st.tuples(CONTENTS, UNITS), min_size=3, max_size=6),
    )
    def begin(
        self, *, stays: bool, listed_max: int, stuck: str, segments: list[tuple[list[tuple[str, list[int]]], int]]
    ) -> None:
        self.listed = pytest.MonkeyPatch()
        self.listed.setattr("wald_reclaim.evidence.LISTED_MAX", listed_max)
        self.path = Path(tempfile.mkdtemp())
        self.built = Built(self.path / "root")
        self.model = Model()
        self.noise = Random(1)  # which cannot be compressed
        self.boots = 1
        self.stays = stays
        self.reclaimer: Reclaimer | None = None
        for route in ROUTES:
            add_route(self.built.root, self.built.disk, route)
        for contents, unit in segments:
            self.grow(contents, unit)
        for route in ROUTES:
            at = self.model.cursors[route, "processed"] = 0 if route == stuck else self.built.last
            self.built.log.set_cursor(route, at)

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.end_the_process()
            self.listed.undo()
            shutil.rmtree(self.path)

    def process(self, disk: Disk | None = None) -> Reclaimer:
        """The one that makes the next pass."""
        return self.reclaimer or Reclaimer(self.built.root, disk or self.built.disk, boot=self.built.boot)

    def end_the_process(self) -> None:
        if self.reclaimer is not None:
            self.reclaimer.ledger.close()
            self.reclaimer = None

    @rule(contents=CONTENTS, unit=UNITS)
    def grow(self, contents: list[tuple[str, list[int]]], unit: int) -> None:
        """A sealed segment more."""
        batches: Batches = []
        for route, sizes in contents:
            lines = [self.noise.randbytes(size * unit).replace(b"\n", b"") for size in sizes]
            first = self.built.lines(route, lines)
            self.model.gone.discard(route)
            batches.append([(first + number, route, len(line) + 1) for number, line in enumerate(lines)])
        self.built.cut()
        self.built.seal()
        base = batches[0][0][0]
        self.model.complete.append(Held(base, batches, self.size(base)))

    def size(self, base: int) -> int:
        return self.built.root.segment(base, Kind.SEALED).stat().st_size

    @rule()
    def boot(self) -> None:
        """Restart the monotonic clock."""
        self.end_the_process()
        self.boots += 1
        self.built.boot = f"boot {self.boots}"
        self.built.ahead_ns = self.built.now_ns

    @precondition(lambda self: self.model.complete)
    @rule(route=routes, group=groups, data=st.data())
    def move_a_cursor(self, route: str, group: str, data: st.DataObject) -> None:
        """Move it to the last record of the route in a segment, or one before."""
        ends = [held.of(route)[-1][0] for held in self.model.complete if held.of(route)] or [0]
        sequence = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-1, 0))
        if route not in self.model.gone:
            self.built.log.set_cursor(route, max(0, sequence), group, rewind=True)
            self.model.cursors[route, group] = max(0, sequence)

    @precondition(lambda self: self.model.complete)
    @rule(route=routes)
    def read_all_but(self, route: str) -> None:
        """A route is stuck, and the groups of the others are at the end."""
        for other, group in list(self.model.cursors):
            if other not in (route, *self.model.gone):
                self.built.log.set_cursor(other, self.built.last, group, rewind=True)
                self.model.cursors[other, group] = self.built.last

    @precondition(lambda self: self.model.complete)
    @rule(route=routes, data=st.data())
    def archive(self, route: str, data: st.DataObject) -> None:
        """Up to a record of the route; bundles follow each other."""
        there = [sequence for held in self.model.complete for sequence, _, _ in held.of(route)]
        before = self.model.archived.get(route, 0)
        if there and there[-1] > before:
            last = data.draw(st.sampled_from([sequence for sequence in there if sequence > before]))
            line = {"event": "archived", "route": route, "first": before + 1, "last": last, "after": before}
            archive = Ledger(self.built.root.ledger / "archive.jsonl", self.built.disk)
            archive.append({**line, "bundle": f"{route}{last}"})
            archive.close()
            self.model.archived[route] = last

    @rule(route=routes, group=groups, what=st.sampled_from(["spoil a cursor", "lose", "retire", "add", "add"]))
    def disturb(self, route: str, group: str, what: str) -> None:
        """A route or its cursor; a lost route is one without its directory, and so without its cursors."""
        root, model = self.built.root, self.model
        if what == "add":
            add_route(root, self.built.disk, route)
            model.retired.discard(route)
            model.gone.discard(route)
        elif what == "lose":
            shutil.rmtree(root.route(route), ignore_errors=True)
            model.gone.add(route)
            model.retired.discard(route)
            model.cursors = {key: at for key, at in model.cursors.items() if key[0] != route}
        elif route not in model.gone and what == "retire":
            retire_route(root, self.built.disk, route, now="")
            model.retired.add(route)
        elif route not in model.gone:
            root.cursor(route, group).write_bytes(b"ten")
            model.cursors[route, group] = 0

    @rule(seed=st.integers(0, 1 << 32), grace_ns=GRACES, passed=st.integers(0, 4), compact=st.booleans())
    def reclaim(self, seed: int, grace_ns: int, passed: int, *, compact: bool) -> None:
        """A pass from its beginning to its end."""
        random = self.wait(seed, passed)
        reclaimer = self.process()
        if not any(held.whole for held in self.model.complete):
            for _ in range(8):
                self.foresee(reclaimer, self.limits(random))
        limits = self.limits(random)
        shrinker = self.model.look(limits, self.built.moment(), grace_ns, compact=compact)
        self.look(reclaimer, limits, grace_ns, compact=compact)
        there = self.readable()
        for held, outcomes in shrinker:
            held.batches = among(there, held.batches)
            assert held.batches in outcomes, (limits, outcomes)
        for held in self.model.complete:
            held.stored_bytes = self.size(held.base)
        self.reclaimer = reclaimer
        if not self.stays:
            self.end_the_process()
        self.compare(there)

    @rule(
        seed=st.integers(0, 1 << 32),
        grace_ns=GRACES,
        passed=st.integers(0, 4),
        dying=st.sampled_from([DyingDisk, DyingInShrink]),
        dies_at=st.integers(0, 18),
        part=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def reclaim_and_die(
        self, seed: int, grace_ns: int, passed: int, dying: type[DyingDisk], dies_at: int, part: float
    ) -> None:
        """A process that dies; the next one continues."""
        limits = self.limits(self.wait(seed, passed))
        self.end_the_process()
        before = deepcopy(self.model)
        shrinker = self.model.look(limits, self.built.moment(), grace_ns, compact=True)
        disk = dying(dies_at, part=part)
        try:
            reclaimer = self.process(disk)
            self.look(reclaimer, limits, grace_ns, compact=True)
            reclaimer.ledger.close()
        except Died:
            disk.abandon()
        self.go_on_with_what_is_there(before, {held.base: outcomes for held, outcomes in shrinker})

    def wait(self, seed: int, passed: int) -> Random:
        """Let time pass, and look up what age the ledgers prove by then."""
        self.built.now_ns += passed * SECOND_NS or 1  # no two passes have one time, by which a shared line is known
        sealed = read_ledger(self.built.root.ledger / "segments.jsonl").entries
        own = ledger(self.built.root.path)
        known = [*self.model.complete, *(waiting.held for waiting in self.model.released)]
        self.model.ages_ns = {held.base: proven_age_ns(held.base, sealed, own, self.built.moment()) for held in known}
        return Random(seed)

    def look(self, reclaimer: Reclaimer, limits: Limits, grace_ns: int, *, compact: bool) -> None:
        reclaimer.limits = limits
        reclaimer.survey.set_limits(limits, verify=False)
        reclaimer.grace_ns, reclaimer.shrink_pinned = grace_ns, compact
        reclaimer.look(now_ns=self.built.now_ns, ahead_ns=self.built.ahead_ns)

    def readable(self) -> set[int]:
        """The records that a reader gets."""
        return {record.sequence for record in self.built.log.records()}

    def go_on_with_what_is_there(self, before: Model, outcomes: dict[int, list[Batches]]) -> None:
        """Continue from the files of a dead process, which must be a part of its work."""
        root, ended = self.built.root, self.model
        lines = {line["base"]: line for line in ledger(root.path) if line["event"] in ("reclaimed", "kept")}
        self.model, there = deepcopy(before), self.readable()
        self.model.complete, self.model.released = [], []
        released = {waiting.held.base for waiting in before.released}
        staying = {held.base for held in ended.complete}
        for held in sorted([*before.complete, *(each.held for each in before.released)], key=lambda held: held.base):
            line, base = lines.get(held.base, {"event": "kept"}), held.base
            moment, was_on_record, held.recorded = parse_moment(line), held.recorded is not None, None
            written = None
            if line["event"] == "reclaimed" and moment is not None:
                written = OnRecord(moment, frozenset(line.get("lost", {})))
            if base in bases(root):
                self.take_over(held, among(there, held.whole or held.batches), outcomes.get(base, []))
                held.recorded = written
            elif written is not None and root.segment(base, Kind.RELEASED).exists():
                # An interrupted deletion on record is completed before it is confirmed, and then taken back.
                assert base not in staying or base in released or was_on_record
                self.model.released.append(Released(held, written))
            elif written is not None and root.segment(base, Kind.DELETING).exists():
                self.model.released.append(Released(held, written, deleting=True))
            else:
                assert not any(root.segments.glob(f"{base:020}*")), lines[base]
                assert line.get("lost", {}) == ended.lost[base]
                self.model.lost[base] = ended.lost[base]

    def take_over(self, held: Held, found: Batches, outcomes: list[Batches]) -> None:
        """Take over a segment with its name: unchanged, or shrunk, perhaps with its old form."""
        before, whole = held.batches, held.whole or held.batches
        held.batches = found
        assert held.batches in [before, whole, *outcomes]
        second = self.built.root.segments / f"{held.base:020}{Kind.SEALED.value}{WHOLE_SUFFIX}"
        held.whole = whole if second.exists() and held.batches != whole else None
        held.stored_bytes = self.size(held.base)
        self.model.complete.append(held)

    def foresee(self, reclaimer: Reclaimer, limits: Limits) -> None:
        """Compare the segments that a pass would release, and their losses."""
        reclaimer.now = self.built.moment()
        reclaimer.survey.set_limits(limits, verify=False)
        going = [each for each in reclaimer.survey.decisions(now_ns=self.built.now_ns) if each.verdict.is_deletion]
        expected = [held for held in self.model.complete if self.model.goes(held, limits)]
        assert [each.segment.base_sequence for each in going] == [held.base for held in expected], limits
        for decision, held in zip(going, expected, strict=True):
            if held.recorded is None:
                assert (decision.entry or {}).get("lost", {}) == self.model.unread_routes(held)

    def limits(self, random: Random) -> Limits:
        """Limits at which a segment just goes, or just stays; of the log at most a lower and an upper one."""
        complete, require_archived = self.model.complete, random.random() < 0.2
        if random.random() < 0.3:
            return Limits(require_archived=require_archived)
        ages = [self.model.ages_ns[held.base] for held in complete]
        files = [sum(other.stored_bytes for other in self.model.newer(held)) for held in complete]
        whole = [size + held.stored_bytes for size, held in zip(files, complete, strict=True)]
        counts = [sum(len(other.records) for other in [held, *self.model.newer(held)]) for held in complete]
        lowers = [Limits(), Limits(min_age_ns=beside(ages, random)), Limits(keep_bytes=beside(files, random))]
        lower = random.choice(lowers)
        upper = random.choice(
            [
                lower,
                replace(lower, max_age_ns=beside(ages, random)),
                replace(lower, max_bytes=beside(whole, random)),
                replace(lower, max_records=beside(counts, random)),
            ]
        )
        own = {route: self.limits_of(route, random) for route in random.sample(["a", "b"], random.randint(0, 2))}
        others = random.choice([RouteLimits(expire=random.random() < 0.5), self.limits_of("c", random)])
        return replace(upper, of_routes=own, others=others, require_archived=require_archived)

    def limits_of(self, route: str, random: Random) -> RouteLimits:
        """Draw one limit of a route, or sometimes two."""
        sizes, counts, pinned = [], [], []
        for held in self.model.complete:
            newer = [record for other in self.model.newer(held) for record in other.of(route)]
            own = held.of(route)
            sizes.append(sum(size for _, _, size in newer + own))
            counts.append(len(newer + own))
            share = sum(size for _, _, size in own) * self.model.unread(held, route) // len(own) if own else 0
            pinned.append(sum(size for _, _, size in newer) + share)
        drawn = RouteLimits(
            max_age_ns=beside([self.model.ages_ns[held.base] for held in self.model.complete], random),
            max_bytes=beside(sizes, random),
            max_records=beside(counts, random),
            pinned_max_bytes=beside(pinned, random),
        )
        kept = random.sample([each.name for each in fields(RouteLimits)], random.randint(1, 2))
        expire = random.random() < 0.7
        return RouteLimits(**{name: getattr(drawn, name) for name in kept} | {"expire": expire})

    def compare(self, there: set[int]) -> None:
        """Compare the files, the records, and the ledger."""
        root, model = self.built.root, self.model
        assert bases(root) == [held.base for held in model.complete]
        assert sorted(bases(root, Kind.RELEASED)) == sorted(waiting.held.base for waiting in model.released)
        assert [among(there, held.batches) for held in model.complete] == [held.batches for held in model.complete]
        lines = {line["base"]: line for line in ledger(root.path) if line["event"] in ("reclaimed", "kept")}
        assert {base: line.get("lost", {}) for base, line in lines.items() if base in model.lost} == model.lost
        history = History(root)
        deleted = [line for line in history.deletions() if line["base"] in model.lost]
        rulings = [audit_deletion(line, history.line_for_digest(line["base"], line["sha256"])) for line in deleted]
        rulings += [
            audit_shrink(line, history.line_for_digest(line["base"], line["was_sha256"])) for line in shrinks(root)
        ]
        assert [ruling.errors for ruling in rulings if ruling.errors] == []
        assert sum(ruling.unread_records for ruling in rulings) == sum(
            sum(lost.values()) for lost in model.lost.values()
        )


def among(there: set[int], batches: Batches) -> Batches:
    """The batches that are readable."""
    return [batch for batch in batches if there.issuperset(sequence for sequence, _, _ in batch)]


def shrinks(root: Root) -> list[Entry]:
    return [line for line in ledger(root.path) if line["event"] == "shrunk"]


def beside(values: list[int], random: Random) -> int | None:
    """One of the values or one below it, which must not be negative; None without values."""
    return max(0, random.choice(values) - random.randint(0, 1)) if values else None


@pytest.mark.parametrize("examples", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_what_goes_and_what_is_lost_is_what_the_documentation_says(examples: int) -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=examples, stateful_step_count=25))
