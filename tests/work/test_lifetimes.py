"""Lifetime of a work group: start, durability, Ctrl-C, forks, close."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from leasing import cursor, group, killed, leased, sequences, values
from logs import Built
from running import eventually

from wald.errors import Gone, Replaced
from wald.work.group import WorkGroup
from wald.work.journal import Journal
from wald.work.owner import Delivery


def test_the_first_lease_has_what_is_there(built: Built) -> None:
    for _ in range(20):
        built.lines("a", [b"x"] * 1000)
    for number in range(5):
        with WorkGroup(built.root.path, "a", f"g{number}") as work:
            assert len(work.lease("x", 5)) == 5
    built.lines("b", [b"other"])
    with WorkGroup(built.root.path, "b", "h") as work:
        assert values(work.lease("x")) == [b"other"]
        assert work.lease("x") == []


def test_a_report_that_fails_stops_nothing(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        raise RuntimeError("no terminal")

    with WorkGroup(built.root.path, "a", "g", report=report) as work:  # without a daemon
        leased(work, 2)
        work.give_up("x", [1], f"cannot open {chr(0xDCE9)}.pdf")
        eventually(lambda: len(reported) == 1)
        work.ack("x", [2])
        work.skip(1, 1)
        eventually(lambda: cursor(built) == 2)  # moved by the same thread


def test_a_closed_group_refuses(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    got: list[Delivery] = []
    work = group(built)
    work.lease("x", wait=5)
    waiting = threading.Thread(target=lambda: got.extend(work.lease("y", wait=3600)))
    waiting.start()
    eventually(lambda: len(work._loop._waiting) == 1)
    work.close()
    waiting.join()
    assert got == []
    for refused in (lambda: work.ack("x", [1]), lambda: work.lease("x"), lambda: work.release("x")):
        with pytest.raises(ValueError, match="closed"):
            refused()


def test_ctrl_c_ends_the_wait_of_a_worker_and_of_no_other(built: Built) -> None:
    built.lines("a", [b"1"])
    got: list[Delivery] = []
    with group(built) as work:
        work.lease("x", wait=5)
        waiting = work._loop._waiting
        other = threading.Thread(target=lambda: got.extend(work.lease("y", wait=3600)))
        other.start()
        eventually(lambda: len(waiting) == 1)

        def interrupt() -> None:
            eventually(lambda: len(waiting) == 2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            work.lease("z", wait=3600)
        interrupting.join()
        eventually(lambda: len(waiting) == 1)
        for _ in range(2):  # the first one may be in the commit round that withdraws the lease
            asking = threading.Thread(target=lambda: work.claim(3600), daemon=True)
            asking.start()
            asking.join(30)
            assert not asking.is_alive()
        built.lines("a", [b"2"])
        other.join()
    assert values(got) == [b"2"]


def test_who_has_waited_gets_the_error_if_what_comes_cannot_be_written(built: Built) -> None:
    built.lines("a", [b"1"])
    errors: list[int | None] = []

    def worker() -> None:
        try:
            work.lease("y", wait=3600)
        except OSError as error:
            errors.append(error.errno)

    with group(built) as work:
        work.lease("x", wait=5)
        waiting = threading.Thread(target=worker, daemon=True)
        waiting.start()
        eventually(lambda: len(work._loop._waiting) == 1)
        full = os.open("/dev/full", os.O_RDWR)
        journal = work._loop._journal
        assert isinstance(journal, Journal)
        os.dup2(full, journal._descriptor)
        os.close(full)
        built.lines("a", [b"2"])
        waiting.join(30)
    assert errors == [errno.ENOSPC]


def test_a_log_that_is_gone_for_a_moment_is_worked_on_again(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    away = built.root.path.with_name("away")
    with group(built) as work:
        assert sequences(work.lease("x", 2, wait=5)) == [1, 2]
        assert work.ack("x", [1]) == []
        built.root.path.rename(away)
        for _ in range(2):
            with pytest.raises(Gone):
                work.ack("x", [2])
        with pytest.raises(Gone):
            work.lease("y", wait=0)
        assert not work.has_failed
        away.rename(built.root.path)
        assert work.ack("x", [2]) == []
        assert work.floor == 2
    with group(built) as work:
        assert work.floor == 2


def test_nothing_is_acknowledged_in_a_journal_that_is_not_at_its_path(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    with group(built) as work:
        assert sequences(work.lease("x", 2, wait=5)) == [1, 2]
        assert work.ack("x", [1]) == []
        eventually(lambda: cursor(built) == 1)  # afterwards, no write is pending
        copy = shutil.copytree(
            built.root.path, built.root.path.with_name("copy"), ignore=shutil.ignore_patterns("*.ask")
        )
        built.root.path.rename(built.root.path.with_name("away"))
        copy.rename(built.root.path)
        for _ in range(2):
            with pytest.raises(Replaced, match=r"cursors/g\.work: the journal was replaced by another file"):
                work.ack("x", [2])
        assert work.has_failed
    with group(built) as work:
        assert work.floor == 1


def test_what_is_acknowledged_with_a_lease_that_waits_is_acknowledged_once(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    with group(built) as work:
        assert sequences(work.lease("x", 1, wait=5)) == [1]
        assert sequences(work.lease("y", 1, wait=5)) == [2]
        waiting = threading.Thread(target=lambda: work.lease("x", wait=3600, done=[1, 2]))  # it never had 2
        waiting.start()
        eventually(lambda: len(work._loop._waiting) == 1)
        assert work.nack("y", [2], delay=3600) == []
        work.claim(0)  # another commit round
        assert work.floor == 1
        work.release("z")
        assert work.floor == 1
        work.close()
        waiting.join()


OPERATIONS: dict[str, Callable[[WorkGroup], object]] = {
    "ack": lambda work: work.ack("x", [1]),
    "lease with done": lambda work: work.lease("x", done=[1]),
    "lease with done that waits": lambda work: work.lease("x", wait=0.01, done=[1, 2, 3]),
    "nack with a delay": lambda work: work.nack("x", [1], delay=3600),
    "give up": lambda work: work.give_up("x", [1], "it has teeth"),
    "another delivery": lambda work: (work.nack("x", [1]), work.lease("x")),
    "skip": lambda work: work.skip(1, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_must_outlive_a_crash_is_on_disk_when_it_returns(
    built: Built, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    on_disk: dict[int, bytes] = {}
    sync = os.fdatasync

    def synced(descriptor: int) -> None:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        sync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = data

    monkeypatch.setattr("os.fdatasync", synced)
    with group(built) as work:
        leased(work, 3)
        OPERATIONS[name](work)
        journal = built.root.cursor_directory("a") / "g.work"
        assert on_disk[journal.stat().st_ino] == journal.read_bytes()


def test_a_child_of_a_fork_cannot_use_the_group_nor_hold_it(built: Built) -> None:
    built.lines("a", [b"1"])
    work = group(built)
    reading, writing = os.pipe()
    release, released = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(released)
            with suppress(Exception):
                work.lease("x")
            try:
                work.ack("x", [1])
            except ValueError as error:
                os.write(writing, str(error).encode())
            os.read(release, 1)
        finally:
            os._exit(0)
    os.close(writing)
    assert b"after the fork" in os.read(reading, 1000)
    work.close()
    with group(built) as work:  # the child is running, without the lock
        assert values(work.lease("x", wait=5)) == [b"1"]
    os.close(released)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(release)


def test_the_cursor_is_moved_at_a_start_to_where_the_journal_is(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    work = group(built)
    leased(work, 2)
    work._maintenance.close()
    work.ack("x", [1, 2])
    killed(work)
    assert cursor(built) == 0
    with group(built):
        eventually(lambda: cursor(built) == 2)
