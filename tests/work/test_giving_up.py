"""Records that a worker or an operator has given up on: dead letters, and records that the cursor skips."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import records
from damage import peak_bytes
from draining import drain
from logs import Built
from running import Daemon, eventually, output_of

import wald
from wald.format.names import WORK_SUFFIX
from wald.work.deliveries import Deliveries, Part, Refusal
from wald.work.group import WorkGroup
from wald.work.journal import Failure, RecoveredProgress, recover_progress
from wald.work.snapshot import read_status, work_file
from wald.work.window import Run

SECOND = 1_000_000_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with routes a and b, and ten records on a."""
    with Daemon(tmp_path / "log") as running:
        for route in "ab":
            output_of("route", "add", route, "--root", running.root)
        output_of("append", "a", "--root", running.root, stdin=b"".join(b"%d\n" % each for each in range(1, 11)))
        yield running


def letters(root: Path) -> list[tuple[bytes, str, str]]:
    """Return value, reason and tries of each dead letter."""
    found = records(root, "dead_letter") if (root / "routes/dead_letter").exists() else []
    headers = [json.loads(record.headers or b"") for record in found]
    return [(r.value, h["wald.reason"], h["wald.tries"]) for r, h in zip(found, headers, strict=True)]


def test_a_worker_may_give_up_what_it_has(daemon: Daemon) -> None:
    said: list[str] = []
    with WorkGroup(daemon.root, "a", "g", report=said.append) as work:
        assert len(work.lease("x", 5, wait=30)) == 5
        assert len(work.lease("y", 5, wait=30)) == 5
        assert work.give_up("x", [2, 7], "it has teeth") == [Refusal(7, "y")]
        assert work.give_up("x", [4], "exit 1 after 3 tries", 3) == []
        eventually(lambda: work.given_up == 2)
        assert work.ack("x", [1, 3, 5]) == []
        assert work.floor == 5
        work.release("y")
        assert [delivery.record.sequence for delivery in work.lease("z", 10)] == [6, 7, 8, 9, 10]

    assert letters(daemon.root) == [(b"2", "it has teeth", "1"), (b"4", "exit 1 after 3 tries", "3")]
    assert said == [
        "a 2: given up: it has teeth; sent to dead_letter as 11",
        "a 4: given up: exit 1 after 3 tries; sent to dead_letter as 12",
    ]


def test_what_was_given_up_without_a_daemon_is_a_dead_letter_later(daemon: Daemon) -> None:
    """It is sent once, although the owner has restarted in between, and no worker asks for a lease."""
    daemon.kill()
    said: list[str] = []
    with WorkGroup(daemon.root, "a", "g", report=said.append) as work:
        work.lease("x", 1, wait=30)
        work.give_up("x", [1], "it has teeth")
        eventually(lambda: said)
        assert work.given_up == 0
    assert "a 1: cannot become a dead letter: " in said[0]
    with WorkGroup(daemon.root, "a", "g", report=said.append) as work:
        assert [delivery.record.sequence for delivery in work.lease("x", 3, wait=30)] == [2, 3, 4]
        work.give_up("x", [3], "it has teeth")
        eventually(lambda: len(said) == 3)
        daemon.start_again()
        eventually(lambda: work.given_up == 2)
        assert work.floor == 1
    assert sorted(letters(daemon.root)) == [(b"1", "it has teeth", "1"), (b"3", "it has teeth", "1")]


def test_a_dead_letter_that_is_put_back_is_due_when_it_was(daemon: Daemon) -> None:
    """A stream reader ignores the delay, and its dead letter keeps the due time for workers."""
    output_of("append", "b", "--delay", "1h", "--root", daemon.root, stdin=b"late\n")
    assert drain("--root", daemon.root, "b", "--tries", 1, "--exit-at-end", "--", "false").returncode == 10
    assert drain("--root", daemon.root, "redrive").returncode == 0
    first, again = records(daemon.root, "b")
    assert again.headers == first.headers
    with WorkGroup(daemon.root, "b", "g") as work:
        output_of("append", "b", "--root", daemon.root, stdin=b"now\n")
        assert [delivery.record.value for delivery in work.lease("x", wait=30)] == [b"now"]


def test_a_failure_of_the_upkeep_is_reported_once_for_each_time_it_lasts(built: Built) -> None:
    """Writing the cursor fails twice because a directory has its name."""
    built.lines("a", [b"job"] * 4)
    log, said = wald.open(built.root.path), list[str]()
    log.set_cursor("a", 0, "g")
    cursor, away = built.root.path / "routes/a/cursors/g.cursor", built.root.path / "away"

    def failures() -> int:
        return sum("retrying every second" in line for line in said)

    with WorkGroup(built.root.path, "a", "g", report=said.append) as work:
        for count in (1, 2):
            cursor.rename(away)
            cursor.mkdir()
            work.ack("x", [delivery.record.sequence for delivery in work.lease("x", 1, wait=30)])
            eventually(lambda: failures() == count)  # noqa: B023
            cursor.rmdir()
            eventually(lambda: log.cursor("a", "g").sequence == count)  # noqa: B023
    assert failures() == 2


def test_an_owner_that_asks_for_no_reports_finds_them_in_the_log(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """A retired dead-letter route rejects records, so no worker has those that cannot be given up."""
    daemon.ask("ROUTE ADD dead_letter")
    daemon.ask("ROUTE RETIRE dead_letter")
    with WorkGroup(daemon.root, "a", "g", max_tries=1) as work:
        work.lease("x", 1, wait=30)
        work.give_up("x", [1], "it has teeth")
        eventually(lambda: "is retired" in caplog.text)
        daemon.ask("ROUTE ADD dead_letter")
        eventually(lambda: work.floor == 1)

    (warning,) = (each for each in caplog.messages if "route 'dead_letter' is retired" in each)
    assert warning.startswith("a 1: cannot become a dead letter: ")
    assert "hint: " in warning


def test_a_record_without_a_try_left_does_not_wait_for_its_delay(daemon: Daemon) -> None:
    with WorkGroup(daemon.root, "a", "g", max_tries=2) as work:
        for tries in (1, 2):
            assert [(each.record.sequence, each.tries) for each in work.lease("x", 1, wait=30)] == [(1, tries)]
            work.nack("x", [1], delay=3600 * (tries - 1), reason="it has teeth")
        eventually(lambda: work.floor == 1)

    assert letters(daemon.root) == [(b"1", "it has teeth", "2")]


def test_giving_up_many_records_at_once_takes_linear_time(built: Built) -> None:
    """All workers of the group wait for it."""
    count = 50_000
    built.lines("a", [b""] * count)
    with WorkGroup(built.root.path, "a", "g", max_tries=1) as work:
        leased = work.lease("x", count, 1 << 30, wait=30)
        before = time.process_time()
        assert work.nack("x", [each.record.sequence for each in leased], delay=60) == []
        assert time.process_time() - before < 5
    assert len(leased) == count


def test_what_is_being_given_up_cannot_be_acknowledged(built: Built) -> None:
    """The dead letter may already exist. Without a daemon, every try is in doubt."""
    built.lines("a", [b"job"] * 2)
    said: list[str] = []
    with WorkGroup(built.root.path, "a", "g", max_tries=1, report=said.append) as work:
        assert len(work.lease("x", 2, wait=30)) == 2
        work.give_up("x", [1], "it has teeth")
        work.nack("x", [2], reason="exit 1")
        assert work.lease("x") == []
        eventually(lambda: len(said) == 2)
        assert work.ack("x", [1, 2]) == [Refusal(1, ""), Refusal(2, "")]
        assert work.lease("x", done=[1, 2]) == []
        assert work.floor == 0
    with WorkGroup(built.root.path, "a", "g") as work:
        assert sorted(work.ack("x", [1, 2])) == [Refusal(1, ""), Refusal(2, "")]


def test_the_tries_that_a_worker_counts_never_go_down(built: Built) -> None:
    """They survive restarts and compaction, and count even after the worker has lost the record."""
    built.lines("a", [b"job"] * 4)
    with WorkGroup(built.root.path, "a", "g") as work:
        work.lease("x", 3, wait=30)
        assert work.nack("x", [1, 2], reason="exit 1", tries=3) == []
        assert work.nack("y", [3], reason="exit 2", tries=7) == [Refusal(3, "x")]
    with WorkGroup(built.root.path, "a", "g") as work:
        assert [work.failed(each) for each in (1, 2, 3)] == [Failure("exit 1", 3), Failure("exit 1", 3), None]
        refused = work.nack("x", [2, 3, 4], reason="killed", tries=4)
        assert sorted(refused) == [Refusal(2, ""), Refusal(3, ""), Refusal(4, "")]
        work.lease("x", 1, wait=30)
        work.nack("x", [1], reason="later")
    with WorkGroup(built.root.path, "a", "g") as work:
        found = [work.failed(each) for each in (1, 2, 3, 4)]
        assert found == [Failure("later", 3), Failure("killed", 4), Failure("killed", 4), None]
        work.lease("x", 1, wait=30)
        work.nack("x", [1], tries=5)
        assert work.failed(1) == Failure("later", 5)
        work.lease("x", 4, wait=30)
        work.ack("x", [1, 2])
        assert work.failed(1) is None


def test_a_cursor_that_is_moved_passes_over_records(built: Built) -> None:
    """This applies to leased, waiting and unread records."""
    built.lines("a", [b"job"] * 10)
    said: list[str] = []
    with WorkGroup(built.root.path, "a", "g", report=said.append) as work:
        assert len(work.lease("x", 2, wait=30)) == 2
        work.nack("x", [2], delay=3600)
        built.log.set_cursor("a", 6, "g")
        eventually(lambda: work.floor == 6)
        assert work.ack("x", [1]) == []
        assert [delivery.record.sequence for delivery in work.lease("x", 10)] == [7, 8, 9, 10]
        work.ack("x", [7, 8, 9, 10])
        assert said == ["a: the cursor was moved to 6; continuing after it"]
        built.lines("b", [b"other"])
        built.log.set_cursor("a", 11, "g")
        eventually(lambda: len(said) == 2)
        built.lines("a", [b"more"])
        assert [delivery.record.sequence for delivery in work.lease("x", 10, wait=30)] == [12]
    assert built.log.cursor("a", "g").sequence == 11
    with WorkGroup(built.root.path, "a", "g") as work:
        assert [delivery.record.sequence for delivery in work.lease("x", 10, wait=30)] == [12]


def test_what_comes_in_before_a_moved_cursor_is_passed_over(built: Built) -> None:
    """The cursor is moved beyond the records that the group has read."""
    for _ in range(5):
        built.lines("a", [b"job"] * 2)
    said: list[str] = []
    with WorkGroup(built.root.path, "a", "g", report=said.append) as work:
        built.log.set_cursor("a", 7, "g")
        eventually(lambda: said)
        assert work.lease("x", 10, wait=30)[0].record.sequence == 8


def test_a_cursor_that_was_moved_beyond_the_journal_passes_over_records(built: Built) -> None:
    """No owner was running, and the last one had not read that far."""
    for _ in range(5):
        built.lines("a", [b"job"] * 2)
    with WorkGroup(built.root.path, "a", "g", window=2) as work:
        assert [delivery.record.sequence for delivery in work.lease("x", 10, wait=30)] == [1, 2]
    built.log.set_cursor("a", 7, "g")
    assert recover_progress(built.log, "a", "g") == RecoveredProgress(7, 0, 0)
    with WorkGroup(built.root.path, "a", "g") as work:
        assert work.floor == 7
        assert work.lease("x", 10, wait=30)[0].record.sequence == 8


def test_dead_letters_and_reasons_survive_compaction(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner keeps running, without a daemon."""
    monkeypatch.setattr("wald.work.journal._GROWN_BYTES", 0)
    monkeypatch.setattr("wald.work.journal._GROWN_TIMES", 0)
    built.lines("a", [b"job"] * 3)
    with WorkGroup(built.root.path, "a", "g") as work:
        assert len(work.lease("x", 3, wait=30)) == 3
        work.nack("x", [1], reason="exit 1", tries=2)
        work.give_up("x", [2], "it has teeth", 3)
        work.ack("x", [3])
    seen = read_status(built.log, work_file(built.root, "a", "g"), 0)
    assert seen.snapshot.failures == {1: Failure("exit 1", 2)}
    assert [(dead.sequence, dead.reason, dead.tries) for dead in seen.snapshot.dead] == [(2, "it has teeth", 3)]


def test_leases_without_an_end_cost_no_memory() -> None:
    """Memory is freed once their records are returned."""

    def work(rounds: int) -> None:
        deliveries = Deliveries(0)
        for number in range(1, rounds + 1):
            deliveries.append(Run(number, number))
            deliveries.deliver(Run(number, number), [Part("x", (number + 10**9) * SECOND, 1)], now_ns=number * SECOND)
            deliveries.finish([("x", [number])])

    work(10)
    assert peak_bytes(lambda: work(10_000)) < 750_000


def test_how_far_workers_are_is_read_from_the_journal(built: Built) -> None:
    built.lines("a", [b"job"] * 3)
    built.lines("b", [b"other"] * 2)
    built.lines("a", [b"job"] * 3)
    log = built.log
    assert recover_progress(log, "a", "g") == RecoveredProgress(0, 0, 0)
    with WorkGroup(log, "a", "g") as work:
        got: list[int] = []
        while len(got) < 6:
            got += [delivery.record.sequence for delivery in work.lease("x", 6, wait=30)]
        work.ack("x", [1, 2])
    assert recover_progress(log, "a", "g") == RecoveredProgress(2, 0, 0)
    with WorkGroup(log, "a", "g") as work:
        assert len(work.lease("x", 6, wait=30)) >= 1
        work.ack("x", [6, 8])
    assert recover_progress(log, "a", "g") == RecoveredProgress(2, 2, 0)
    log.set_cursor("a", 6, "g")
    assert recover_progress(log, "a", "g") == RecoveredProgress(6, 1, 0)
    log.set_cursor("a", 8, "g")
    assert recover_progress(log, "a", "g") == RecoveredProgress(8, 0, 0)
    assert (built.root.cursor_directory("a") / f"g{WORK_SUFFIX}").exists()
