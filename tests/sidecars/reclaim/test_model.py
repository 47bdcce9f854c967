"""In any order of events, unread records stay readable, and nothing else is kept.

Appends, cuts, seals, cursors that move, are rewound, damaged, created and removed, routes retired and restored, the
daemon killed, reclaim passes that die at any step: a model knows for each record whether all groups had read it at some
pass. Only such records may be gone. In some of these logs segments share a line of the ledger, as those with many
routes do.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from contents import errors
from faults import Died, DyingDisk
from hypothesis import settings, target
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from logs import Built, Unsynced
from reclaiming import bases, ledger, reclaim, rulings

from wald.files.routes import add_route, retire_route
from wald.format.names import Kind
from wald_reclaim.evidence import LISTED_MAX

ROUTES = ["a", "b"]
GROUPS = ["processed", "processed", "processed", "audit"]
routes, groups = st.sampled_from(ROUTES), st.sampled_from(GROUPS)
SPOILT = [b"", b"\0\0\0", b"ten", b"5\n{", b"99999999\n"]


class Interleavings(RuleBasedStateMachine):
    """The log, and what must be true of it."""

    @initialize(listed_max=st.sampled_from([0, LISTED_MAX]))
    def begin(self, listed_max: int) -> None:
        self.listed = pytest.MonkeyPatch()
        self.listed.setattr("wald_reclaim.evidence.LISTED_MAX", listed_max)
        self.path = Path(tempfile.mkdtemp())
        self.epoch = 1
        self.built = Built(self.path / "root")
        self.appended: dict[int, tuple[str, bytes]] = {}
        self.released: set[int] = set()
        self.cursors: dict[tuple[str, str], int] = {}
        self.retired: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.listed.undo()
            if not any(at < 0 for at in self.cursors.values()):  # a spoilt cursor is an error, and reported as one
                assert errors(self.built.root.path) == []
            ledger(self.built.root.path)  # its chain is whole
            assert not any(rulings(self.built.root).values())
            target(float(len(self.released)))
            shutil.rmtree(self.path)

    @rule(route=routes, count=st.integers(1, 3))
    def append(self, route: str, count: int) -> None:
        first = self.built.lines(route, [b"%d" % n for n in range(count)])
        self.appended |= {first + n: (route, b"%d" % n) for n in range(count)}

    @rule(route=routes)
    def grow(self, route: str) -> None:
        """A sealed segment more."""
        self.append(route, 2)
        self.cut()
        self.seal(0)

    @precondition(lambda self: self.built.writer.has_advanced)
    @rule()
    def cut(self) -> None:
        self.built.cut()

    @rule(keep=st.integers(0, 2))
    def seal(self, keep: int) -> None:
        self.built.seal(keep=keep)

    @rule()
    def kill_the_daemon(self) -> None:
        self.built.crash()
        self.epoch += 1
        self.built = Built(self.built.root.path, epoch=self.epoch, now_ns=self.built.now_ns)

    @precondition(lambda self: self.appended)
    @rule(route=routes, group=groups, data=st.data())
    def set_cursor(self, route: str, group: str, data: st.DataObject) -> None:
        """Mostly to the end of a segment or one before it, where a rule that is wrong by one shows."""
        if route not in self.built.log.routes():
            return
        ends = [base - 1 for base in (*bases(self.built.root), *bases(self.built.root, Kind.RAW))]
        sequence = data.draw(st.sampled_from([*ends, self.built.last])) - data.draw(st.integers(0, 1))
        sequence = max(0, sequence)
        self.built.log.set_cursor(route, sequence, group, rewind=True)
        self.cursors[route, group] = sequence

    @rule(route=routes, group=groups, content=st.sampled_from(SPOILT))
    def spoil_a_cursor(self, route: str, group: str, content: bytes) -> None:
        if route in self.built.log.routes():
            self.built.root.cursor(route, group).write_bytes(content)
            self.cursors[route, group] = -1

    @rule(route=routes, group=groups)
    def remove_a_cursor(self, route: str, group: str) -> None:
        if route in self.built.log.routes():
            self.built.root.cursor(route, group).unlink(missing_ok=True)
            self.cursors.pop((route, group), None)

    @rule(route=routes)
    def retire(self, route: str) -> None:
        if route in self.built.log.routes():
            retire_route(self.built.root, self.built.disk, route, now="")
            self.retired.add(route)

    @rule(route=routes)
    def take_back(self, route: str) -> None:
        add_route(self.built.root, self.built.disk, route)
        self.retired.discard(route)

    @rule(dies_at=st.integers(0, 12), part=st.sampled_from([0.0, 0.5]))
    def reclaim_and_die(self, dies_at: int, part: float) -> None:
        self.release()
        disk = DyingDisk(dies_at, part=part)
        try:
            reclaim(self.built, disk=disk)
        except Died:
            disk.abandon()

    @rule()
    def reclaim_to_the_end(self) -> None:
        """Afterwards only needed segments are left."""
        self.release()
        reclaim(self.built, disk=Unsynced())
        newest = max(bases(self.built.root) + bases(self.built.root, Kind.RAW))
        needed = {n for n in self.appended if not self.passed(n)}
        for base in bases(self.built.root):
            following = min(
                (b for b in bases(self.built.root) + bases(self.built.root, Kind.RAW) if b > base), default=1 << 64
            )
            assert base == newest or any(base <= n < following for n in needed)
        assert bases(self.built.root, Kind.RELEASED) == []

    def passed(self, sequence: int) -> bool:
        """Return True if every group has processed a record."""
        route, _ = self.appended[sequence]
        if route in self.retired:
            return True
        reported = [at for (of, _), at in self.cursors.items() if of == route]
        return bool(reported) and min(reported) >= sequence

    def release(self) -> None:
        """Begin a pass: records that every group has processed may be gone from now on."""
        self.built.now_ns += 1  # no two passes have one time, by which a shared line is known
        self.released |= {sequence for sequence in self.appended if self.passed(sequence)}

    @invariant()
    def what_was_not_released_is_readable(self) -> None:
        if not hasattr(self, "built"):
            return
        found = {record.sequence: (record.route, record.value) for record in self.built.log.records()}

        assert found.items() <= self.appended.items()
        assert self.appended.keys() - found.keys() <= self.released


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_only_what_everybody_has_processed_is_gone(examples: int) -> None:
    """In whatever order they append, read, fail and die."""
    run_state_machine_as_test(Interleavings, settings=settings(max_examples=examples, stateful_step_count=30))
