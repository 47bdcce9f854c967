"""Random histories of a work group on a real log, compared with the model of ``tests/support/workgroup_model.py``.

The owner ends or crashes at any point: its unsynced writes survive completely, partly or not at all, possibly followed
by a partial line. While it runs, segments are cut, sealed and reclaimed, and the test sets both clocks. The journal is
compacted after a few lines. Dead letters go to the same log through a daemon that may forget them.
"""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from leasing import Clocks
from logs import Built
from powercut import SECTOR_BYTES
from reclaiming import Reclaimer, bases
from running import eventually
from workgroup_model import Group, Item

from wald.client.producer import Durable
from wald.errors import Damaged, Unavailable
from wald.format.batch import Encoding
from wald.format.records import NOT_BEFORE, decode_columns
from wald.work.group import WorkGroup
from wald.work.owner import Delivery

SECOND = 1_000_000_000
SOON_SECONDS = 30.0
WORKERS = st.sampled_from(["a", "b", "c"])
FEW = st.integers(1, 12)
DELAYS = st.sampled_from([0, 0, 5, 20])
SPANS = st.sampled_from([1, 4, 5, 9, 10, 20])  # so that leases often expire at the same time or a second apart
PICKS = st.lists(st.integers(0, 99), max_size=8)
STRAYS = st.lists(st.integers(0, 99), max_size=2)


class DeadLetters:
    """Stand-in for the daemon: deduplicates dead letters until it forgets the producer.

    Attributes:
        letters: the headers of each dead letter.
        lock: held while appending to the log.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.letters: list[dict[str, str]] = []
        self.known: dict[bytes, int] = {}
        self.works = True
        self.lock = threading.Lock()

    def prepare(self, *_: object, **__: object) -> None:
        with self.lock:
            if not self.works:
                raise Unavailable("no daemon", hint="start one")

    def send(
        self, _daemon: Path, letters: Iterator[tuple[str, bytes]], *, seed: bytes, retry_for: float
    ) -> list[Durable]:
        self.prepare()
        with self.lock:
            ((route, payload),) = letters
            if seed not in self.known:
                headers = decode_columns(payload).headers
                assert headers is not None
                self.letters.append(json.loads(headers.to_list()[0] or b""))
                self.known[seed] = self.built.append(route, payload, 1, encoding=Encoding.COLUMNS)
            return [Durable(self.known[seed], self.known[seed])]


class Synced:
    """Disk that tracks the synced length of each file, without preallocated space, and never waits for a sync."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def __call__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.sizes[status.st_ino] = len(said(os.pread(descriptor, status.st_size, 0)))


def said(data: bytes) -> bytes:
    """Return a journal without the preallocated space after its lines."""
    return data.rstrip(b"\n\0") + b"\n"


class Histories(RuleBasedStateMachine):
    """The log, the group, and its model."""

    by_key = False

    @initialize(window=st.sampled_from([5, 20, 10_000]), max_tries=st.sampled_from([None, 2, 3]))
    def begin(self, window: int, max_tries: int | None) -> None:
        self.patch = pytest.MonkeyPatch()
        self.path = Path(tempfile.mkdtemp())
        self.built = Built(self.path / "root")
        self.daemon, self.synced, self.clocks = DeadLetters(self.built), Synced(), Clocks(now_ns=1000 * SECOND)
        self.patch.setattr("wald.work.dead_letters.prepare", self.daemon.prepare)
        self.patch.setattr("wald.work.dead_letters.send", self.daemon.send)
        self.patch.setattr("wald.work.journal._GROWN_BYTES", 600)
        self.patch.setattr("wald.work.journal._GROWN_TIMES", 1)
        self.patch.setattr("os.fdatasync", self.synced)
        self.patch.setattr("os.fsync", os.fstat)  # for directories, which no crash here affects
        self.built.lines("a", [b"first"])
        self.built.log.set_cursor("a", 1, "g")
        self.model = Group(self.by_key, window, max_tries)
        self.gave_up = 0
        self.letters: set[int] = set()
        self.of: dict[int, list[int]] = {}
        self.start()
        self.append(8, "x-xyz", {2: 10, 5: 25})

    def start(self) -> None:
        self.work = WorkGroup(
            self.built.root.path,
            "a",
            "g",
            order="key" if self.by_key else "log",
            window=self.model.window,
            max_tries=self.model.max_tries,
            clock=self.clocks,
        )

    # Actions of producers and of the log's maintenance.

    @rule(
        count=FEW,
        keys=st.text("-xyz", min_size=1, max_size=5),
        late=st.dictionaries(st.integers(0, 5), st.sampled_from([-5, 5, 10, 40]), max_size=2),
    )
    def append(self, count: int, keys: str, late: dict[int, int]) -> None:
        names = [None if name == "-" else name.encode() for name in islice(cycle(keys), count)]
        due = [self.clocks.wall_ns + late[place] * SECOND if place in late else 0 for place in range(count)]
        headers = [json.dumps({NOT_BEFORE: str(at)}).encode() if at else None for at in due]
        with self.daemon.lock:
            first = self.built.columns("a", [b"x"] * count, keys=names, headers=headers)
        for place, (name, at) in enumerate(zip(names, due, strict=True)):
            item = Item(first + place, first + count - 1, name, at, self.clocks.wall_ns)
            self.model.items[item.sequence] = item

    @rule(count=FEW)
    def append_to_another_route(self, count: int) -> None:
        with self.daemon.lock:
            self.built.lines("b", [b"y"] * count)
            self.built.log.set_cursor("b", self.built.last, "g")

    @rule()
    def cut_and_reclaim(self) -> None:
        self.cut()
        self.reclaim()

    def cut(self) -> None:
        with self.daemon.lock:
            base = self.built.writer.base_sequence
            if self.built.last >= base:
                self.of[base] = list(range(base, self.built.last + 1))
                self.built.cut()
                self.built.seal()

    def reclaim(self) -> None:
        reclaimer = Reclaimer(self.built.root, self.built.disk)
        try:
            reclaimer.look(now_ns=self.built.now_ns)
        finally:
            reclaimer.ledger.close()
        self.note_dead_letters()  # for the records that were just given up
        there = bases(self.built.root)
        for base in [base for base in self.of if base not in there]:
            gone = [self.model.items[s] for s in self.of.pop(base) if s in self.model.items]
            assert all(item.done for item in gone)

    # Actions of workers.

    @rule(worker=WORKERS, limit=FEW, seconds=SPANS)
    def lease(self, worker: str, limit: int, seconds: int) -> None:
        self.take(worker, limit, seconds)

    @rule(worker=WORKERS, limit=FEW, picks=PICKS)
    def work_on_some(self, worker: str, limit: int, picks: list[int]) -> None:
        self.take(worker, limit, 10)
        self.ack(worker, picks, [])

    @rule(worker=WORKERS, limit=FEW, delay=DELAYS, picks=PICKS)
    def give_some_back(self, worker: str, limit: int, delay: int, picks: list[int]) -> None:
        self.take(worker, limit, 10)
        self.nack(worker, delay, "", picks, [])

    def take(self, worker: str, limit: int, seconds: int) -> list[Delivery]:
        self.model.notice()
        self.note_dead_letters()
        before, expected = self.model.floor, self.model.next(self.clocks.wall_ns)
        got: list[Delivery] = []

        def comes() -> bool:
            got.extend(self.work.lease(worker, limit, lease_for=seconds))
            return bool(got) or expected is None

        eventually(comes, timeout=SOON_SECONDS)  # once it has been read
        self.note_dead_letters()
        assert len(got) <= limit
        beside: set[int] = set()
        for record, tries in got:
            item = self.model.items[record.sequence]
            for earlier in self.model.open():
                if earlier.sequence == item.sequence:
                    break
                assert not self.model.must_come(earlier, before, self.clocks.wall_ns), f"not {earlier}"
            assert self.model.may_come(item, beside, self.model.floor), f"{item} beside {beside}"
            assert item.tries <= tries <= item.tries + 1 if item.doubtful else tries == item.tries + 1
            assert record.key == item.key
            self.model.unsettled.discard(record.key or b"")
            item.tries, item.low, item.doubtful = tries, tries, False
            item.holder, item.since_ns = worker, self.clocks.now_ns
            item.until_ns = self.clocks.now_ns + seconds * SECOND
            beside.add(item.sequence)
        return got

    def some(self, worker: str, picks: list[int], strays: list[int]) -> list[int]:
        """Return some or all records of a worker, and some others; none that may be given up concurrently.

        The random choices do not depend on the state, because the state depends on the speed of the machine.
        """
        self.note_dead_letters()
        mine = [item.sequence for item in self.model.held(worker)]
        chosen = [mine[pick % len(mine)] for pick in picks if mine] if picks else mine
        known = [*self.model.items, 1, self.built.last + 5]
        chosen += [known[stray % len(known)] for stray in strays]
        items = self.model.items
        return [s for s in dict.fromkeys(chosen) if s not in items or not self.model.is_given_up(items[s])]

    @rule(worker=WORKERS, picks=PICKS, strays=STRAYS)
    def ack_some(self, worker: str, picks: list[int], strays: list[int]) -> None:
        self.ack(worker, picks, strays)

    def ack(self, worker: str, picks: list[int], strays: list[int]) -> None:
        sequences = self.some(worker, picks, strays)
        refused = {each.sequence: each.holder for each in self.work.ack(worker, sequences)}
        for sequence in sorted(sequences):
            item = self.model.items.get(sequence)
            if item is None:
                assert sequence in refused or sequence == 1
            elif not item.done and self.answered(item, worker, refused):
                item.done, item.holder, item.lapsed = True, "", False

    def answered(self, item: Item, worker: str, refused: dict[int, str]) -> bool:
        """Return True if an acknowledgement of an open record counted; the page permits both in some cases."""
        counted = item.sequence not in refused
        if item.holder and not item.lapsed:
            assert counted == (item.holder == worker), f"{item}: {counted} for {worker}"
            assert counted or refused[item.sequence] == item.holder
        elif item.holder:
            assert counted or item.holder != worker or self.model.behind(item)
        elif not item.tries:
            assert not counted
        elif not item.doubtful and not self.model.behind(item):
            assert counted
        return counted

    @rule(worker=WORKERS, delay=DELAYS, reason=st.sampled_from(["", "odd", "bad"]), picks=PICKS, strays=STRAYS)
    def nack_some(self, worker: str, delay: int, reason: str, picks: list[int], strays: list[int]) -> None:
        self.nack(worker, delay, reason, picks, strays)

    def nack(self, worker: str, delay: int, reason: str, picks: list[int], strays: list[int]) -> None:
        sequences = self.some(worker, picks, strays)
        refused = {each.sequence for each in self.work.nack(worker, sequences, delay=delay, reason=reason)}
        for item in self.settled(worker, sequences, refused):
            self.model.come_back(item)
            item.reason = reason or item.reason
            if delay:
                item.due_ns, item.peak_ns = self.clocks.wall_ns + delay * SECOND, self.clocks.wall_ns

    def settled(self, worker: str, sequences: list[int], refused: set[int]) -> list[Item]:
        """Return the open records for which a call counted: the worker's, perhaps with just expired ones."""
        items = [item for s in sequences if (item := self.model.items.get(s)) is not None and not item.done]
        for item in items:
            if item.holder != worker:
                assert item.sequence in refused
            elif not item.lapsed:
                assert item.sequence not in refused
        return [item for item in items if item.sequence not in refused]

    @rule(worker=WORKERS, seconds=st.integers(1, 60), picks=PICKS, strays=STRAYS)
    def extend(self, worker: str, seconds: int, picks: list[int], strays: list[int]) -> None:
        sequences = self.some(worker, picks, strays)
        refused = {each.sequence for each in self.work.extend(worker, sequences, lease_for=seconds)}
        for item in self.settled(worker, sequences, refused):
            item.lapsed = False
            item.since_ns, item.until_ns = self.clocks.now_ns, self.clocks.now_ns + seconds * SECOND
        self.model.lapse(self.clocks.now_ns)  # records after an expired one still wait for it

    @rule(worker=WORKERS)
    def release(self, worker: str) -> None:
        self.taken_back(self.model.held(worker), self.work.release(worker))

    @rule(seconds=st.integers(0, 30))
    def claim(self, seconds: int) -> None:
        since = self.clocks.now_ns - seconds * SECOND
        self.taken_back([i for i in self.model.open() if i.holder and i.since_ns <= since], self.work.claim(seconds))

    def taken_back(self, items: list[Item], count: int) -> None:
        certain = [item for item in items if not item.lapsed]
        if not self.by_key:
            assert len(certain) <= count <= len(items)
        for item in items:
            self.model.come_back(item)

    # Time.

    @rule(seconds=SPANS)
    def time_passes(self, seconds: int) -> None:
        self.clocks.now_ns += seconds * SECOND
        self.set_wall(self.clocks.wall_ns + seconds * SECOND)
        self.model.lapse(self.clocks.now_ns)

    @rule(seconds=st.integers(-60, 60))
    def the_clock_is_set(self, seconds: int) -> None:
        self.set_wall(self.clocks.wall_ns + seconds * SECOND)

    def set_wall(self, wall_ns: int) -> None:
        self.clocks.wall_ns = wall_ns
        self.model.show(wall_ns)

    # Stop of an owner, and start of the next one.

    @rule()
    def a_new_owner(self) -> None:
        self.work.close()
        self.note_dead_letters()
        cursor = self.built.log.cursor("a", "g").sequence
        known = min([self.model.floor, *(s - 1 for s in self.letters)])  # a letter may exist before the owner knows
        assert max((s for s in self.model.items if s <= known), default=1) <= cursor <= self.model.floor
        self.letters = {sequence for sequence in self.letters if sequence > cursor}
        self.model.crash(cut=False)
        self.start()

    @rule(
        forgets=st.booleans(),
        cut=st.sampled_from([None, 0.0, 0.0, 0.5, 1.0]),
        torn=st.sampled_from([b"", b'{"done": [1, 99', b"\0" * 700, b"\n" * 700]),
    )
    def a_crash(self, *, forgets: bool, cut: float | None, torn: bytes) -> None:
        with self.gone() as (journal, synced):
            data = said(journal.read_bytes())
            keep = len(data) if cut is None else synced + int(cut * (len(data) - synced))
            if cut is not None and torn and not torn.strip(b"\n\0"):  # a lost sector and the next one
                keep = max(synced, keep - keep % SECTOR_BYTES)
            journal.write_bytes(data[:keep] + torn)
        if forgets:
            self.daemon.known.clear()
        self.model.crash(cut=cut is not None)
        self.start()

    @rule(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, place: float, bit: int) -> None:
        """Damage is detected and frees nothing; then it is repaired."""
        with self.gone() as (journal, _):
            data = said(journal.read_bytes())
        end = len(data) - 1
        if end % SECTOR_BYTES == 0:  # then damage at the end of the last line looks like a torn line
            end = data.rindex(b"\n", 0, end)
        at = int(place * (end - 1))
        journal.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(Damaged):
            self.start()
        self.reclaim()
        journal.write_bytes(data)
        self.model.crash(cut=False)
        self.start()

    @contextmanager
    def gone(self) -> Iterator[tuple[Path, int]]:
        """Freeze the journal and the cursor; yield the synced length of each."""
        path, cursor = self.built.root.cursor_directory("a") / "g.work", self.built.log.cursor("a", "g").path
        with self.daemon.lock:
            moved = cursor.read_bytes()
            with path.open("rb") as journal:  # it may be replaced at any moment
                data, inode = journal.read(), os.fstat(journal.fileno()).st_ino
            synced = self.synced.sizes.get(inode, 0)  # read last: the length that is synced by then
            works, self.daemon.works = self.daemon.works, False
        self.work.close()
        self.daemon.works = works
        cursor.write_bytes(moved)
        path.write_bytes(data)
        yield path, min(synced, len(said(data)))
        self.synced.sizes[path.stat().st_ino] = len(said(path.read_bytes()))

    @precondition(lambda self: self.model.max_tries is not None)
    @rule()
    def the_daemon_ends_or_starts(self) -> None:
        self.daemon.works = not self.daemon.works

    def note_dead_letters(self) -> None:
        """Check the new dead letters: each record once, after enough tries."""
        with self.daemon.lock:
            new, self.gave_up = self.daemon.letters[self.gave_up :], len(self.daemon.letters)
        for letter in new:
            item = self.model.items[int(letter["wald.origin.sequence"])]
            assert not item.done, f"{item} is a dead letter"
            assert self.model.is_given_up(item), f"{item} is a dead letter"
            assert int(letter["wald.tries"]) == item.tries
            assert not item.reason or letter["wald.reason"] == item.reason
            item.done, item.holder, item.lapsed = True, "", False
            self.letters.add(item.sequence)
            self.model.unsettled.add(item.key or b"")

    # Invariants.

    @invariant()
    def the_floor_is_before_the_first_open_record(self) -> None:
        if hasattr(self, "work"):
            floor, cursor = self.work.floor, self.built.log.cursor("a", "g").sequence
            self.note_dead_letters()  # afterwards, because a record may be given up at any moment
            assert floor <= self.model.floor
            assert cursor <= self.model.floor

    @invariant()
    def what_is_out_is_with_whom_it_was_leased_to(self) -> None:
        if hasattr(self, "work"):
            out = {s: p.worker for p in self.work.pending() if p.worker for s in range(p.first, p.last + 1)}
            held = {item.sequence: item.holder for item in self.model.open() if item.holder}
            certain = {item.sequence: item.holder for item in self.model.open() if item.holder and not item.lapsed}
            assert certain.items() <= out.items() <= held.items()

    def teardown(self) -> None:
        """Check that every unacknowledged record is still delivered or is a dead letter."""
        if not hasattr(self, "work"):
            return
        try:
            self.daemon.works = True
            eventually(self.drained, timeout=2 * SOON_SECONDS)
            self.work.close()
            last = max(self.model.items, default=1)
            assert self.built.log.cursor("a", "g").sequence >= last
        finally:
            self.work.close()
            self.patch.undo()
            self.built.crash()
            shutil.rmtree(self.path)

    def drained(self) -> bool:
        self.time_passes(100)
        for delivery in self.take("a", 100, 1000):
            self.model.items[delivery.record.sequence].done = True
            assert self.work.ack("a", [delivery.record.sequence]) == []
        self.note_dead_letters()
        return not self.model.open()


class ByKey(Histories):
    by_key = True


@pytest.mark.parametrize(("examples", "steps"), [(12, 30), pytest.param(60, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("histories", [Histories, ByKey], ids=["log", "key"])
def test_every_history_is_one_of_the_model(histories: type[Histories], examples: int, steps: int) -> None:
    run_state_machine_as_test(histories, settings=settings(max_examples=examples, stateful_step_count=steps))
