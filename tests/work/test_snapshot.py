"""A snapshot of a work group agrees with its owner, and its progress counts once it is on disk."""

import errno
import fcntl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from faults import FailingDisk, TracingDisk
from hypothesis import given, settings
from leasing import Clocks
from logs import START_NS, Built
from running import eventually

from wald.format.work import Commit, JournalStart, WorkerLease, encode_work
from wald.work.group import Order, WorkGroup
from wald.work.journal import Journal
from wald.work.snapshot import GroupSnapshot, GroupStatus, Progress, read_status, work_file
from wald.work.window import Run

TICK_NS = 100_000_000
RECORDS = 140  # in two pages
KEYS = (None, b"k", b"l")
WORKERS = ("a", "b", "c")


def seen(built: Built, now_ns: int) -> GroupStatus:
    return read_status(built.log, work_file(built.root, "a", "g"), now_ns)


def of_owner(work: WorkGroup) -> dict[int, tuple[str, int]]:
    """Return the worker and the remaining ticks of each record."""
    return {
        sequence: (each.worker, round(each.left * 10))
        for each in work.pending()
        for sequence in range(each.first, each.last + 1)
    }


def of_snapshot(found: GroupStatus, now_ns: int) -> dict[int, tuple[str, int]]:
    return {
        sequence: (each.worker, round(((each.until_ns or 0) - now_ns) / TICK_NS))
        for each in found.snapshot.out()
        for sequence in range(each.first, each.last + 1)
    }


Step = Callable[[WorkGroup, Clocks, list[int]], object]
workers = st.sampled_from(WORKERS)
sequences = st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=20)
seconds = st.integers(1, 20)


def of_some(call: Callable[..., object], *given: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    """Return steps that call a method of the group for a worker and some records."""
    return st.builds(
        lambda worker, some, *rest: lambda work, _clocks, had: call(work, worker, [had[at] for at in some], *rest),
        workers,
        sequences,
        *given,
    )


steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(
        lambda worker, count, for_: lambda work, _clocks, _had: work.lease(worker, count, lease_for=for_),
        workers,
        st.integers(1, 100),
        seconds,
    ),
    of_some(WorkGroup.ack),
    of_some(WorkGroup.nack, st.sampled_from([0, 0, 5])),
    of_some(WorkGroup.extend, seconds),
    st.builds(lambda worker: lambda work, _clocks, _had: work.release(worker), workers),
    st.builds(lambda idle: lambda work, _clocks, _had: work.claim(idle), seconds),
    st.builds(lambda ticks: lambda _work, clocks, _had: clocks.advance(ticks * TICK_NS), st.integers(1, 100)),
)


@pytest.mark.parametrize("examples", [6, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("order", "grown_bytes"), [("log", 256 << 10), ("key", 0)])
def test_the_snapshot_agrees_with_the_owner(order: Order, grown_bytes: int, examples: int) -> None:
    """This holds even if the journal is compacted constantly and records of a key return together."""

    @settings(max_examples=examples, deadline=None)
    @given(plan=st.lists(steps, min_size=12, max_size=25))
    def follow(plan: list[Step]) -> None:
        assert_snapshots_agree(order, grown_bytes, plan)

    follow()


def assert_snapshots_agree(order: Order, grown_bytes: int, plan: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("wald.work.journal._GROWN_BYTES", grown_bytes)
        patch.setattr("wald.work.journal._GROWN_TIMES", 1)
        built = Built(Path(directory) / "root")
        for first in range(0, RECORDS, 35):
            numbers = range(first, first + 35)
            built.columns("a", [b"%d" % number for number in numbers], keys=[KEYS[number % 3] for number in numbers])
            built.lines("other", [b"between"])
        had = [record.sequence for record in built.log.records("a")]
        clocks = Clocks()
        with WorkGroup(built.root.path, "a", "g", order=order, clock=clocks) as work:
            eventually(lambda: work.lease("a", 1))
            for step in plan:
                step(work, clocks, had)
                now_ns = clocks.time_ns()
                owner, found = of_owner(work), seen(built, now_ns)
                assert of_snapshot(found, now_ns) == owner
                assert found.snapshot.floor == work.floor
                firsts = {each.first: each.tries for each in work.pending()}
                told = {at: each.tries for each in found.snapshot.out() for at in range(each.first, each.last + 1)}
                assert firsts.items() <= told.items()


def test_what_waits_is_named_with_its_time(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3", b"4"])
    clocks = Clocks()
    with WorkGroup(built.root.path, "a", "g", clock=clocks) as work:
        eventually(lambda: work.lease("x", 4))
        work.nack("x", [2], delay=60)
        work.nack("x", [3], delay=60, reason="no route")
        snapshot = seen(built, clocks.time_ns()).snapshot
        later = seen(built, clocks.time_ns() + 61 * 10**9).snapshot
    assert [tuple(each) for each in snapshot.waiting()] == [
        (2, 2, START_NS + 60 * 10**9, 1, ""),
        (3, 3, START_NS + 60 * 10**9, 1, "no route"),
    ]
    assert (list(later.waiting()), later.open) == ([], 4)


def test_records_that_were_read_with_those_that_were_leased_count_as_read(built: Built) -> None:
    built.lines("a", [b"%d" % number for number in range(10)])
    with WorkGroup(built.root.path, "a", "g") as work:
        eventually(lambda: work.lease("x", 3))
        snapshot = seen(built, START_NS).snapshot
    assert (snapshot.end, snapshot.open) == (11, 10)


def test_looking_never_keeps_an_owner_from_starting(built: Built) -> None:
    """If no process is listed as the holder, a reader briefly takes the lock of the group."""
    built.lines("a", [b"1"])
    with WorkGroup(built.root.path, "a", "g"):
        pass
    looking = work_file(built.root, "a", "g").lock.open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.02, looking.close).start()
    with WorkGroup(built.root.path, "a", "g"):
        assert looking.closed


def test_a_line_that_is_being_written_is_not_damage(built: Built) -> None:
    built.lines("a", [b"1"])
    with WorkGroup(built.root.path, "a", "g") as work:
        eventually(lambda: work.lease("x", 1))
    path = work_file(built.root, "a", "g").path
    whole = path.read_bytes().rstrip(b"\n") + b"\n"
    for end in range(0, len(whole), 3):
        path.write_bytes(whole[:end])
        assert seen(built, START_NS).damage == ""


@pytest.mark.parametrize(
    "commit", [Commit(leased=[WorkerLease("x", 1, [(5, 4)])]), Commit(done=[(-9, 9)]), Commit(due=[(7, -1)])], ids=str
)
def test_a_journal_that_no_owner_wrote_is_damage_at_most(built: Built, commit: Commit) -> None:
    """Another user may plant a journal next to a cursor."""
    built.lines("a", [b"1"])
    with WorkGroup(built.root.path, "a", "g"):
        pass
    start = JournalStart(built.log_id, "a", "g", 0, 1)
    work_file(built.root, "a", "g").path.write_bytes(encode_work(start, 0) + encode_work(commit, 0))
    assert isinstance(seen(built, START_NS).snapshot, GroupSnapshot)


ALL = [Run(1, 5)]


@pytest.fixture
def journal(built: Built) -> Journal:
    """Progress of a group that has read all records and processed none."""
    built.lines("a", [b"x"] * 5)
    built.log.set_cursor("a", 0, "g")
    journal = Journal(built.root, built.disk, JournalStart(built.log_id, "a", "g", 0, 1), lambda _: None)
    journal.append([Commit(read=[(1, 5)])])
    journal.sync()
    return journal


def test_what_the_owner_has_not_synced_is_synced_before_it_counts(built: Built, journal: Journal) -> None:
    disk = TracingDisk()
    progress = Progress(built.log, "a", "g", disk)
    progress.read()
    assert (progress.unprocessed(ALL), disk.steps) == (ALL, [])
    for done in (1, 2):
        journal.append([Commit(done=[(done, done)])])
        progress.read()
        assert progress.unprocessed(ALL) == [Run(done + 1, 5)]
        assert disk.steps.count(("sync", "g.work")) == done
        assert disk.steps.count(("sync_directory", "cursors")) == 1
    journal.rewrite([JournalStart(built.log_id, "a", "g", 3, 4)])
    progress.read()
    assert progress.unprocessed(ALL) == [Run(4, 5)]
    assert disk.steps.count(("sync_directory", "cursors")) == 2
    journal.close()


def test_what_cannot_be_synced_does_not_count(built: Built, journal: Journal) -> None:
    progress = Progress(built.log, "a", "g", FailingDisk(0, more=1, number=errno.EIO))
    journal.append([Commit(done=[(2, 3)])])
    for _ in range(2):
        progress.read()
        with pytest.raises(OSError, match="Input/output error"):
            progress.unprocessed(ALL)
    journal.close()


def test_a_cursor_is_on_disk_before_it_counts(built: Built) -> None:
    """Another process may see the new cursor before its name is on disk."""
    built.lines("a", [b"x"] * 5)
    built.log.set_cursor("a", 4, "g")
    disk = TracingDisk()
    progress = Progress(built.log, "a", "g", disk)
    progress.read()

    assert progress.unprocessed(ALL) == [Run(5, 5)]
    assert disk.steps == [("sync", "g.cursor"), ("sync_directory", "cursors")]
