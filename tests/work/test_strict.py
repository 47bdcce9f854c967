"""A strict group: one worker at a time, in order, and its progress is the cursor alone."""

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import records
from faults import Died, DyingDisk
from leasing import cursor, group, killed, sequences
from logs import Built
from owning import Owning
from running import Daemon, eventually, output_of

import wald
from wald.consumer import Consumer
from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald.format.names import Kind
from wald.format.records import NOT_BEFORE
from wald.format.work import DeadRecord, JournalStart
from wald.work.deliveries import Refusal
from wald.work.group import WorkGroup
from wald.work.journal import discard
from wald.work.strict import CursorJournal, resume


@pytest.fixture
def log(built: Built) -> Built:
    """Six records of route a in three batches, with a record of route b between them."""
    built.lines("a", [b"1", b"2"])
    built.lines("b", [b"other"])
    built.lines("a", [b"4"])
    built.lines("a", [b"5", b"6", b"7"])
    return built


def strict(log: Built) -> WorkGroup:
    return group(log, order="strict")


def has_journal(log: Built) -> bool:
    return (log.root.cursor_directory("a") / "g.work").exists()


def test_one_worker_gets_all_that_has_arrived_in_order(log: Built) -> None:
    with strict(log) as work:
        assert sequences(work.lease("x", 4, wait=5)) == [1, 2, 4, 5]
        assert work.lease("y") == work.lease("x") == []
        assert work.ack("x", [1, 2, 4, 5]) == []
        assert cursor(log) == 5
        assert sequences(work.lease("y", 100, wait=5)) == [6, 7]
        log.lines("a", [b"8"])
        assert work.lease("x", wait=0.1) == []
        assert work.ack("y", [6, 7]) == []
        assert sequences(work.lease("x", wait=5)) == [8]
    assert not has_journal(log)


def test_a_record_that_failed_blocks_later_ones(log: Built) -> None:
    with strict(log) as work:
        work.lease("x", wait=5)
        work.ack("x", [1])
        assert work.nack("x", [2], delay=0.2) == []
        assert work.lease("y") == []
        assert sequences(work.lease("y", 2, wait=5)) == [2, 4]
        work.release("y")
        work.lease("y", wait=5)
        work.nack("y", [5], delay=0.2)
        assert sequences(work.lease("y", wait=5)) == [2, 4]
        work.ack("y", [2, 4])
        assert sequences(work.lease("y", wait=5)) == [5, 6, 7]


def test_an_acknowledgement_out_of_order_is_refused(log: Built) -> None:
    with strict(log) as work:
        work.lease("x", wait=5)
        assert work.ack("x", [1, 4, 5]) == [Refusal(4, ""), Refusal(5, "")]
        assert work.ack("x", [4]) == [Refusal(4, "")]
        assert cursor(log) == 1
        with pytest.raises(Refused, match="is not the next one of group g"):
            work.skip(5, 5)
        assert work.skip(2, 4) == 2
        assert cursor(log) == 4
        assert work.ack("x", [5, 6]) == []
    assert cursor(log) == 6


def test_the_first_record_can_be_skipped(log: Built) -> None:
    with strict(log) as work:
        assert work.skip(1, 1) == 1
        assert cursor(log) == 1


def test_a_killed_owner_leaves_the_cursor_alone(log: Built) -> None:
    work = strict(log)
    work.lease("x", 3, wait=5)
    work.ack("x", [1, 2])
    killed(work)
    assert (cursor(log), has_journal(log)) == (2, False)
    with Consumer(log.root.path, "a", "g") as consumer:
        assert [record.sequence for record in consumer] == [4, 5, 6, 7]


@pytest.mark.parametrize("position", [1, 6])
def test_a_cursor_that_is_moved_is_followed_at_once(log: Built, position: int) -> None:
    """The move may be forward or back, by wald or by a shell; earlier leases no longer count."""
    with strict(log) as work:
        work.lease("x", 3, wait=5)
        work.ack("x", [1, 2, 4])
        assert sequences(work.lease("x", 1, wait=5)) == [5]
        if position == 1:
            log.log.set_cursor("a", position, "g", rewind=True)
        else:
            log.root.cursor("a", "g").write_text(f"{position}\n")
        assert work.ack("x", [5]) == ([Refusal(5, "")] if position == 1 else [])
        assert sequences(work.lease("x", wait=5)) == ([2, 4, 5, 6, 7] if position == 1 else [7])
        log.root.cursor("a", "g").unlink()
        work.ack("x", sequences(work.lease("x")) or [2, 4, 5, 6, 7])
    assert cursor(log) == 7


def test_an_idle_worker_sees_a_rewind(log: Built) -> None:
    with strict(log) as work:
        work.ack("x", sequences(work.lease("x", wait=5)))
        log.log.set_cursor("a", 4, "g", rewind=True)
        assert sequences(work.lease("x", wait=5)) == [5, 6, 7]


def test_a_cursor_that_cannot_be_trusted_ends_the_group(log: Built) -> None:
    with strict(log) as work:
        work.lease("x", wait=5)
        log.root.cursor("a", "g").write_text("not a number\n")
        for _ in range(2):
            with pytest.raises(Damaged, match="it is unknown which records have been processed"):
                work.ack("x", [1])
    assert log.root.cursor("a", "g").read_text() == "not a number\n"


def test_a_record_that_cannot_be_read_comes_after_all_before_it(log: Built) -> None:
    log.lines("a", [b"damaged"])
    log.lines("a", [b"behind"])
    raw = log.path(1, Kind.RAW)
    raw.write_bytes(raw.read_bytes().replace(b"damaged", b"Damaged"))
    with strict(log) as work:
        assert sequences(work.lease("x", wait=5)) == [1, 2, 4, 5, 6, 7]
        work.ack("x", [1, 2, 4, 5, 6, 7])
        for _ in range(2):
            with pytest.raises(Damaged, match="record 8"):
                work.lease("x", wait=5)


def test_a_delay_in_a_record_is_ignored(built: Built) -> None:
    headers = json.dumps({NOT_BEFORE: str(time.time_ns() + 3600 * 10**9)}).encode()
    built.columns("a", [b"later"], headers=[headers])
    with strict(built) as work:
        assert sequences(work.lease("x", wait=5)) == [1]


def test_it_continues_after_workers(log: Built) -> None:
    """The exception: workers have processed records above the cursor."""
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("w", 6)
        owner.ask("ack", "w", [1, 2, 5])
    with pytest.raises(Refused, match="workers of group g have processed records above the cursor, 3"):
        strict(log)
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("w", 3)
        owner.ask("ack", "w", [4])
    log.root.cursor("a", "g").write_text("1\n")
    with strict(log) as work:
        assert sequences(work.lease("x", wait=5)) == [6, 7]
        assert (cursor(log), has_journal(log)) == (5, False)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with three records on route a."""
    with Daemon(tmp_path / "log") as running:
        output_of("route", "add", "a", "--root", running.root)
        output_of("append", "a", "--root", running.root, stdin=b"1\n2\n3\n")
        yield running


def letters(root: Path) -> list[bytes]:
    return [each.value for each in records(root, "dead_letter")] if (root / "routes/dead_letter").exists() else []


def test_records_behind_one_that_is_given_up_wait_until_it_is_a_dead_letter(daemon: Daemon) -> None:
    """A restarted owner finishes giving it up before it forgets the record."""
    daemon.stop()
    work = WorkGroup(daemon.root, "a", "g", order="strict", report=lambda _: None)
    work.lease("x", 2, wait=5)
    work.ack("x", [1])
    work.give_up("x", [2], "it has teeth")
    assert work.ack("x", [2]) == [Refusal(2, "")]
    assert work.lease("x", wait=0.2) == []
    killed(work)
    journal = daemon.root / "routes/a/cursors/g.work"
    assert journal.exists()
    with pytest.raises(Refused, match="workers of group g"), Consumer(daemon.root, "a", "g") as consumer:
        next(iter(consumer))
    daemon.start_again()
    with WorkGroup(daemon.root, "a", "g", order="strict") as work:
        assert sequences(work.lease("x", wait=30)) == [3]
        assert letters(daemon.root) == [b"2"]
        eventually(lambda: not journal.exists())
        assert wald.open(daemon.root).cursor("a", "g").sequence == 2


def test_a_record_with_too_many_tries_is_given_up(daemon: Daemon) -> None:
    with WorkGroup(daemon.root, "a", "g", order="strict", max_tries=2) as work:
        for _ in range(2):
            assert sequences(work.lease("x", 1, wait=5)) == [1]
            work.nack("x", [1])
        assert sequences(work.lease("x", wait=30)) == [2, 3]
    assert letters(daemon.root) == [b"1"]


class State:
    """The part of an owner that its journal writes."""

    def __init__(self) -> None:
        self.last_done = 1
        self.dead: dict[int, DeadRecord] = {}


class KeepingDisk(Disk):
    def unlink(self, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_a_journal_that_cannot_be_removed_is_closed_once(log: Built) -> None:
    state = State()
    start = JournalStart(log.log.identity.log_id, "a", "g", 1, 2)
    journal = CursorJournal(log.log, KeepingDisk(), start, state, lambda _: None)  # type: ignore[arg-type]
    state.dead[2] = DeadRecord(2, 3, "exit 1 after 3 tries", 7, "dead_letter", 7)
    journal.sync()
    state.dead.clear()
    with pytest.raises(OSError, match="Input/output error"):
        journal.sync()
    with (log.root.path / "head").open("rb") as other:  # has the descriptor of the journal
        journal.close()
        os.fstat(other.fileno())


def test_a_crash_at_any_step_keeps_a_dead_letter_until_the_cursor_has_passed_it(log: Built) -> None:
    letter = DeadRecord(2, 3, "exit 1 after 3 tries", 7, "dead_letter", 7)
    start = JournalStart(log.log.identity.log_id, "a", "g", 1, 2)
    for step in range(100):
        log.log.set_cursor("a", 1, "g", rewind=True)
        state, disk, may_be_sent, is_sent = State(), DyingDisk(step), False, False
        died = False
        try:
            journal = CursorJournal(log.log, disk, start, state, lambda _: None)  # type: ignore[arg-type]
            state.dead[2] = letter
            journal.sync()
            may_be_sent = True
            state.last_done, is_sent = 2, True
            del state.dead[2]
            journal.sync()
            journal.close()
        except Died:
            disk.abandon()
            died = True
        found = resume(log.log, Disk(), "a", "g", cursor(log))

        passed = found.deliveries.window.floor == 2
        assert found.dead == ({2: letter} if may_be_sent and not passed else {}) or not (may_be_sent or passed)
        assert not passed or is_sent
        if not died:
            break
        discard(log.root, Disk(), "a", "g")
    assert step > 8
