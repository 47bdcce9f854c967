"""Random histories of a log with limits and quotas, beside a model in plain lists: what goes, and what is lost.

The model is written from the documentation. It knows every segment with its records, and the cursors; it decides anew
in each pass, with nothing kept from the one before. Limits are drawn at what there is, and one beside it. The log is a
real one. One process makes all passes, and its limits change between them, or each pass is a process of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from logs import SECOND_NS, Built
from reclaiming import Reclaimer, bases, ledger

from wald.format.names import Kind
from wald.store.files.routes import add_route, retire_route
from wald.store.retention.history import History
from wald.store.retention.legality import judge
from wald_reclaim.policy import Limits, RouteLimits

ROUTES = ["a", "b", "c"]
GROUPS = ["processed", "audit"]
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=3)
CONTENTS = st.lists(st.tuples(st.sampled_from(ROUTES), SIZES), min_size=1, max_size=3)
routes, groups = st.sampled_from(ROUTES), st.sampled_from(GROUPS)


@dataclass
class Held:
    """A sealed segment: its records as (sequence, route, payload bytes)."""

    base: int
    records: list[tuple[int, str, int]]
    sealed_ns: int
    stored_bytes: int

    def of(self, route: str) -> list[tuple[int, str, int]]:
        return [record for record in self.records if record[1] == route]

    def routes(self) -> list[str]:
        return sorted({route for _, route, _ in self.records})


@dataclass
class Released:
    """A segment that waits for its end: since when, and whose unread records go with it."""

    held: Held
    since_ns: int
    losing: frozenset[str]


@dataclass
class Model:
    """The log as lists."""

    complete: list[Held] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    """Routes without a directory."""
    lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """What was lost with each segment that was deleted."""

    def unread(self, held: Held, route: str) -> int:
        """The records of a route that a group has still to read."""
        if route in self.retired:
            return 0
        ats = [at for (of, _), at in self.cursors.items() if of == route and route not in self.gone]
        return sum(sequence > min(ats, default=0) for sequence, _, _ in held.of(route))

    def unread_routes(self, held: Held) -> dict[str, int]:
        return {route: unread for route in held.routes() if (unread := self.unread(held, route))}

    def newer(self, held: Held) -> list[Held]:
        return [other for other in self.complete if other.base > held.base]

    def goes(self, held: Held, limits: Limits, now_ns: int) -> bool:
        """Whether every route agrees, and no lower limit holds what is only read."""
        answers = [self.answer(held, route, limits, now_ns) for route in held.routes()]
        young = limits.min_age_ns is not None and now_ns - held.sealed_ns < limits.min_age_ns
        newer_bytes = sum(other.stored_bytes for other in self.newer(held))
        kept = limits.keep_bytes is not None and newer_bytes < limits.keep_bytes
        return "needed" not in answers and ("read" not in answers or not (young or kept))

    def answer(self, held: Held, route: str, limits: Limits, now_ns: int) -> str:
        """What a route says: "needed", "read", or "beyond"."""
        own = limits.of(route)
        newer = [record for other in self.newer(held) for record in other.of(route)]
        total_bytes = sum(size for _, _, size in newer + held.of(route))
        files = sum(other.stored_bytes for other in [held, *self.newer(held)])
        records = sum(len(other.records) for other in [held, *self.newer(held)])
        beyond = any(
            limit is not None and there > limit
            for there, limit in [
                (now_ns - held.sealed_ns, own.max_age_ns),
                (total_bytes, own.max_bytes),
                (len(newer) + len(held.of(route)), own.max_records),
                (now_ns - held.sealed_ns, limits.max_age_ns),
                (files, limits.max_bytes),
                (records, limits.max_records),
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

    def look(self, limits: Limits, now_ns: int, grace_ns: int) -> None:
        """A pass of wald-reclaim."""
        going = [held for held in self.complete if self.goes(held, limits, now_ns)]
        self.complete = [held for held in self.complete if held not in going]
        self.released += [Released(held, now_ns, frozenset(self.unread_routes(held))) for held in going]
        for waiting in list(self.released):
            unread = self.unread_routes(waiting.held)
            if not all(route in waiting.losing and limits.loses(route) for route in unread):
                self.released.remove(waiting)
                self.complete = sorted([*self.complete, waiting.held], key=lambda held: held.base)
            elif now_ns - waiting.since_ns >= grace_ns:
                self.released.remove(waiting)
                self.lost[waiting.held.base] = unread


class Histories(RuleBasedStateMachine):
    """The log, and the model of it."""

    @initialize(stays=st.booleans(), segments=st.lists(CONTENTS, min_size=3, max_size=6))
    def begin(self, *, stays: bool, segments: list[list[tuple[str, list[int]]]]) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.built = Built(self.path / "root")
        self.model = Model()
        self.reclaimer = Reclaimer(self.built.root, self.built.disk) if stays else None
        for route in ROUTES:
            add_route(self.built.root, self.built.disk, route)
        for contents in segments:
            self.grow(contents)
        for route in ROUTES:
            self.built.log.set_cursor(route, self.built.last)
            self.model.cursors[route, "processed"] = self.built.last

    def teardown(self) -> None:
        if hasattr(self, "path"):
            if self.reclaimer is not None:
                self.reclaimer.ledger.close()
            shutil.rmtree(self.path)

    @rule(contents=CONTENTS)
    def grow(self, contents: list[tuple[str, list[int]]]) -> None:
        """A sealed segment more."""
        records = []
        for route, sizes in contents:
            first = self.built.lines(route, [b"x" * size for size in sizes])
            self.model.gone.discard(route)
            records += [(first + number, route, size + 1) for number, size in enumerate(sizes)]
        self.built.cut()
        self.built.seal()
        base = records[0][0]
        stored_bytes = self.built.root.segment(base, Kind.SEALED).stat().st_size
        self.model.complete.append(Held(base, records, self.built.now_ns, stored_bytes))

    @precondition(lambda self: self.model.complete)
    @rule(route=routes, group=groups, data=st.data())
    def move_a_cursor(self, route: str, group: str, data: st.DataObject) -> None:
        """To the end of what a segment holds of the route, or one beside it."""
        ends = [held.of(route)[-1][0] for held in self.model.complete if held.of(route)] or [0]
        sequence = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-1, 0))
        if route not in self.model.gone:
            self.built.log.set_cursor(route, max(0, sequence), group, rewind=True)
            self.model.cursors[route, group] = max(0, sequence)

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

    @rule(seed=st.integers(0, 1 << 32), grace=st.sampled_from([0, 4 * SECOND_NS]), passed=st.integers(0, 4))
    def reclaim(self, seed: int, grace: int, passed: int) -> None:
        self.built.now_ns += passed * SECOND_NS
        random = Random(seed)
        reclaimer = self.reclaimer or Reclaimer(self.built.root, self.built.disk)
        for _ in range(8):
            self.foresee(reclaimer, self.limits(random))
        limits = self.limits(random)
        self.model.look(limits, self.built.now_ns, grace)
        reclaimer.planner.take_over(limits, verify=False)
        reclaimer.grace_ns = grace
        reclaimer.look(now_ns=self.built.now_ns)
        if self.reclaimer is None:
            reclaimer.ledger.close()
        self.compare()

    def foresee(self, reclaimer: Reclaimer, limits: Limits) -> None:
        """What a pass would release, and what would be lost."""
        now_ns = self.built.now_ns
        reclaimer.now = self.built.moment()
        reclaimer.planner.take_over(limits, verify=False)
        going = [each for each in reclaimer.planner.decisions(now_ns=now_ns) if each.verdict.goes]
        expected = [held for held in self.model.complete if self.model.goes(held, limits, now_ns)]
        assert [each.segment.base_sequence for each in going] == [held.base for held in expected], limits
        for decision, held in zip(going, expected, strict=True):
            assert (decision.entry or {}).get("lost", {}) == self.model.unread_routes(held)

    def limits(self, random: Random) -> Limits:
        """Limits at which a segment just goes, or just stays; of the log at most a lower and an upper one."""
        complete = self.model.complete
        ages = [self.built.now_ns - held.sealed_ns for held in complete]
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
        return replace(upper, of_routes=own, others=others)

    def limits_of(self, route: str, random: Random) -> RouteLimits:
        """Of a route mostly one limit, sometimes two."""
        sizes, counts, pinned = [], [], []
        for held in self.model.complete:
            newer = [record for other in self.model.newer(held) for record in other.of(route)]
            own = held.of(route)
            sizes.append(sum(size for _, _, size in newer + own))
            counts.append(len(newer + own))
            share = sum(size for _, _, size in own) * self.model.unread(held, route) // len(own) if own else 0
            pinned.append(sum(size for _, _, size in newer) + share)
        drawn = RouteLimits(
            max_age_ns=beside([self.built.now_ns - held.sealed_ns for held in self.model.complete], random),
            max_bytes=beside(sizes, random),
            max_records=beside(counts, random),
            pinned_max_bytes=beside(pinned, random),
        )
        kept = random.sample([each.name for each in fields(RouteLimits)], random.randint(1, 2))
        expire = random.random() < 0.7
        return RouteLimits(**{name: getattr(drawn, name) for name in kept} | {"expire": expire})

    def compare(self) -> None:
        """The files, the records, and what the ledger says."""
        root, model = self.built.root, self.model
        assert bases(root) == [held.base for held in model.complete]
        assert sorted(bases(root, Kind.RELEASED)) == sorted(waiting.held.base for waiting in model.released)
        lines = {line["base"]: line for line in ledger(root.path) if line["event"] in ("reclaimed", "kept")}
        assert {base: line.get("lost", {}) for base, line in lines.items() if base in model.lost} == model.lost
        history = History(root)
        deleted = [line for line in history.deletions() if line["base"] in model.lost]
        rulings = [judge(line, history.sealed(line["base"])) for line in deleted]
        assert [ruling.errors for ruling in rulings if ruling.errors] == []
        assert sum(ruling.lost for ruling in rulings) == sum(sum(lost.values()) for lost in model.lost.values())


def beside(values: list[int], random: Random) -> int | None:
    """One of the values or one below it, which must not be negative; None without values."""
    return max(0, random.choice(values) - random.randint(0, 1)) if values else None


@pytest.mark.parametrize("examples", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_what_goes_and_what_is_lost_is_what_the_documentation_says(examples: int) -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=examples, stateful_step_count=20))
