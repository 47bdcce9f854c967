"""Commands that outlive their drain: waiting for them, messages about them, and no record processed again."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from contents import records
from draining import Gate, Start, await_line, cursor, drain, drain_refusal
from jobs import ONCE, VALUES, Jobs
from logs import Built
from running import TIMEOUT_SECONDS, eventually, output_of

import wald


def test_a_drain_without_workers_waits_for_commands_of_workers(built: Built, jobs: Jobs, start: Start) -> None:
    """It refuses to process again records above the cursor that workers have done."""
    jobs.hold(1, 2)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 2)), 1, 2)
    second = start(*jobs.arguments(built.root.path, "--exit-at-end"))
    await_line(second, "waits for the command that an earlier wald-drain has left running")
    jobs.fail(1)
    jobs.let_go(1, 2)
    assert second.wait(TIMEOUT_SECONDS) == 9
    code, message, hint = drain_refusal(*jobs.arguments(built.root.path, "--exit-at-end"))

    assert code == 9
    assert message == (
        "route a: workers of group processed have processed records above the cursor, 0, which would be processed again"
    )
    assert "feed a --group processed --workers 1 --exit-at-end -- sh " in hint
    jobs.mend(1)
    assert drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end")).returncode == 0
    assert jobs.processed == ONCE
    built.lines("a", [b"more"])
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end")).returncode == 0
    assert jobs.processed == ONCE | {"more": 1}


def test_a_drain_without_workers_goes_on_where_they_are_through(built: Built, jobs: Jobs, start: Start) -> None:
    """It does so even if the cursor was behind when the workers were killed."""
    jobs.hold(9)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 1)), 9)
    jobs.fail(9)
    jobs.let_go(9)
    eventually(lambda: not jobs.running)
    jobs.mend(9)
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end", "--batch-records", 1)).returncode == 0

    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20


def test_without_a_cursor_nothing_counts_that_workers_have_left(built: Built, jobs: Jobs, start: Start) -> None:
    """This applies to a drain without workers and to workers after it."""
    jobs.fail(1)
    first = start(*jobs.arguments(built.root.path, "--workers", 1))
    eventually(lambda: len(jobs.processed) == 19)
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIMEOUT_SECONDS) == 0
    jobs.mend(1)
    built.root.cursor("a", "processed").unlink()
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end")).returncode == 0

    assert jobs.processed == {value: 1 if value == "1" else 2 for value in VALUES}
    assert not (built.root.cursor_directory("a") / "processed.work").exists()


def test_workers_wait_for_the_command_of_a_drain_without(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(3)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--batch-records", 5)), 3)
    second = start(*jobs.arguments(built.root.path, "--workers", 3, "--exit-at-end"))
    await_line(second, "waits for the command that an earlier wald-drain has left running")
    jobs.let_go(3)

    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE


@pytest.fixture
def four(root: Path) -> Built:
    """Records 1 to 4 on route a, each with its sequence as value."""
    log = Built(root)
    log.lines("a", [b"1", b"2", b"3", b"4"])
    return log


def shown(four: Built) -> dict[str, Any]:
    return json.loads(output_of("group", "show", "a", "processed", "--root", four.root.path, "--json"))  # type: ignore[no-any-return]


def text(four: Built, command: str = "show") -> str:
    words = ("a", "processed") if command == "show" else ("a",)
    return output_of("group", command, *words, "--root", four.root.path).decode()


def test_a_group_shows_the_commands_of_its_workers(four: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(1, 2)
    began_ns = time.time_ns()
    process = start(*jobs.arguments(four.root.path, "--workers", 2))
    jobs.await_running(1, 2)
    commands = shown(four)["commands"]
    held = {line.worker: line.pid for line in jobs.running.values()}

    assert {each["worker"]: each["process"] for each in commands} == held
    assert [each["worker"] for each in commands] == [1, 2]
    for each in commands:
        assert each["command"] == " ".join(map(str, jobs.words))
        assert abs(each["started_ns"] - began_ns) < TIMEOUT_SECONDS * 10**9
        assert each["left"] is False
    assert f"worker-1: process {held[1]}, since 20" in text(four)
    assert "left running" not in text(four)
    assert "waits for" not in text(four, "list")
    process.terminate()


def test_what_a_start_waits_for_is_named_with_what_ends_it(four: Built, jobs: Jobs, start: Start) -> None:
    """The suggested command ends the process and its children."""
    jobs.hold(2)
    first = start(*jobs.arguments(four.root.path, "--workers", 2))
    jobs.await_running(2)
    eventually(lambda: len(jobs.processed) == 3)
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    command = jobs.running["2"].pid
    assert f"start its workers, which wait for process {command}\n" in text(four)
    second = start(*jobs.arguments(four.root.path, "--workers", 2, "--exit-at-end"))
    await_line(second, f"process {command}, since 20")
    eventually(lambda: f"kill -- -{command}\n" in text(four))

    assert [(each["process"], each["process_group"], each["left"]) for each in shown(four)["commands"]] == [
        (command, command, True)
    ]
    assert f"wait until process {command} has ended; to end it: kill -- -{command}\n" in text(four)
    assert ", left running by an earlier wald-drain: sh " in text(four)
    assert "  waits for a command: wald " in text(four, "list")
    jobs.let_go(2)
    os.killpg(command, signal.SIGTERM)
    assert second.wait(TIMEOUT_SECONDS) == 0
    assert shown(four)["commands"] == []


def test_a_process_that_a_command_left_in_the_background_is_waited_for_by_name(
    four: Built, jobs: Jobs, start: Start
) -> None:
    """The drain of the command was killed."""
    script = "sleep 1000 > /dev/null 2>&1 & echo $! > $1/sleeping; exit 0"
    first = start("a", "--root", four.root.path, "--", "sh", "-c", script, "sh", jobs.folder)
    eventually(lambda: four.log.cursor("a").sequence == 4)
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    sleeping = int((jobs.folder / "sleeping").read_text())
    try:
        second = start("a", "--root", four.root.path, "--exit-at-end", "--", "true")
        await_line(second, f"process {sleeping}, since 20")
    finally:
        os.kill(sleeping, signal.SIGKILL)
    assert second.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize("options", [("--workers", 2), ("--batch-records", 1)])
def test_ctrl_c_says_what_it_waits_for_and_again_leaves_it(
    four: Built, jobs: Jobs, start: Start, options: tuple[object, ...]
) -> None:
    """The next start uses the exit codes of the commands that were left running."""
    jobs.hold(1)
    first = start(*jobs.arguments(four.root.path, *options))
    jobs.await_running(1)
    if options[0] == "--workers":
        eventually(lambda: len(jobs.processed) == 3)
    command = jobs.running["1"].pid
    first.send_signal(signal.SIGINT)
    await_line(
        first, f"stops once its commands have ended, process {command}; Ctrl-C again leaves them to the next start"
    )
    first.send_signal(signal.SIGINT)
    await_line(first, "interrupted; running commands continue, and the next start waits for them")
    assert first.wait(TIMEOUT_SECONDS) == 130
    assert jobs.running["1"].pid == command
    second = start(*jobs.arguments(four.root.path, *options, "--exit-at-end"))
    await_line(second, f"process {command}, since 20")
    jobs.let_go(1)
    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == {"1": 1, "2": 1, "3": 1, "4": 1}


def test_a_signal_without_a_command_says_nothing(four: Built, jobs: Jobs, start: Start) -> None:
    process = start(*jobs.arguments(four.root.path, "--workers", 2))
    eventually(lambda: len(jobs.processed) == 4)
    eventually(lambda: not shown(four)["open_records"])
    eventually(lambda: shown(four)["commands"] == [])
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert process.stderr is not None
    assert b"stops once" not in process.stderr.read()


MORE_THAN_A_PIPE_HOLDS = [b"x" * 999] * 1000


class Orphan:
    """Running command whose drain was killed; it exits when the test releases it."""

    def __init__(self, long_log: Built, folder: Path, start: Start, *, exit_code: int = 0) -> None:
        self.root = long_log.root.path
        self.journal = folder / "journal"
        self.journal.touch()
        begun, self.go = Gate(folder / "begun"), Gate(folder / "go")
        script = f"echo > {begun.path}; read go < {self.go.path}; {self.journaling}; exit {exit_code}"
        self.drain = start("a", "--batch-records", 1000, "--exit-at-end", "--root", self.root, "--", "sh", "-c", script)
        begun.await_writer()
        self.drain.kill()
        self.drain.wait(TIMEOUT_SECONDS)

    @property
    def journaling(self) -> str:
        """Return a script that records the batch of a command and its record count."""
        return f'echo "$WALD_FIRST-$WALD_LAST $WALD_COUNT $(wc -l)" >> {self.journal}'

    @property
    def reported(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def successor(self, start: Start) -> subprocess.Popen[bytes]:
        """Start another drain and return it once it reports that it waits."""
        process = start("a", "--exit-at-end", "--root", self.root, "--", "sh", "-c", self.journaling)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert b"waits for the command that an earlier wald-drain has left running" in line
        return process

    @property
    def cursor(self) -> int:
        return wald.open(self.root).cursor("a").effective


@pytest.fixture
def long_log(root: Path) -> Built:
    """Records 1 to 1000 and 1001 on route a."""
    log = Built(root)
    log.lines("a", MORE_THAN_A_PIPE_HOLDS)
    log.lines("a", [b"last"])
    return log


@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_an_orphan_has_processed_is_not_processed_again_unless_it_failed(
    long_log: Built, tmp_path: Path, start: Start, exit_code: int
) -> None:
    """It had not read any of its batch when drain was killed, but the new group had a cursor, which pins it."""
    assert not long_log.root.cursor("a", "processed").exists()
    orphan = Orphan(long_log, tmp_path, start, exit_code=exit_code)
    assert long_log.root.cursor("a", "processed").exists()
    assert orphan.cursor == 0
    successor = orphan.successor(start)
    assert orphan.reported == []
    orphan.go.let_reader_go()

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported == ["1-1000 1000 1000"] * (1 + exit_code) + ["1001-1001 1 1"]
    assert orphan.cursor == 1001


def test_a_killed_keeper_is_no_try(long_log: Built, tmp_path: Path, start: Start) -> None:
    """The exit code of its command is unknown: the whole batch is retried, and no record is given up."""
    keepers = tmp_path / "keepers"
    script = f"echo $WALD_TRY >> {keepers}; [ $(wc -l < {keepers}) = 1 ] && kill -KILL $PPID; exit 0"
    words = ("--tries", 1, "--exit-at-end", "--root", long_log.root.path, "--", "sh", "-c", script)
    done = drain("a", "--batch-records", 500, *words)

    assert done.returncode == 0, done.stderr
    assert b"a 1 to 500: its keeper was killed, so its exit code is unknown, retrying in 0.1 s\n" in done.stderr
    assert keepers.read_text().splitlines() == ["1"] * 4
    assert long_log.log.cursor("a").effective == 1001


def test_waiting_for_an_orphan_ends_with_a_signal(long_log: Built, tmp_path: Path, start: Start) -> None:
    orphan = Orphan(long_log, tmp_path, start)
    successor = orphan.successor(start)
    successor.send_signal(signal.SIGTERM)

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported == []
    orphan.go.let_reader_go()
    assert drain("a", "--exit-at-end", "--root", orphan.root, "--", "true").returncode == 0
    assert len(orphan.reported) == 1


@pytest.mark.parametrize(
    ("sequence", "batches"), [(0, ["1-1000 1000 1000", "1001-1001 1 1"]), (10, ["11-1001 991 991"])]
)
def test_a_cursor_set_since_counts_for_more_than_an_orphan(
    long_log: Built, tmp_path: Path, start: Start, sequence: int, batches: list[str]
) -> None:
    """This applies even if the cursor did not change: the operator wants the records after it."""
    orphan = Orphan(long_log, tmp_path, start)
    long_log.log.set_cursor("a", sequence)
    successor = orphan.successor(start)
    orphan.go.let_reader_go()

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported[1:] == batches
    assert orphan.cursor == 1001


def test_a_command_that_leaves_something_running_does_not_hold_up_its_own_drain(
    long_log: Built, tmp_path: Path
) -> None:
    """Only a successor cannot distinguish the background process from the command."""
    go = tmp_path / "go"
    os.mkfifo(go)
    held = os.open(go, os.O_RDWR)  # keeps a writer open, so that the reader waits for a line
    script = f"(read go < {go}) > /dev/null 2>&1 & exit 0"
    done = drain("a", "--batch-records", 500, "--exit-at-end", "--root", long_log.root.path, "--", "sh", "-c", script)

    assert (done.returncode, done.stderr) == (0, b"")
    assert long_log.log.cursor("a").effective == records(long_log.root.path, "a")[-1].sequence
    os.write(held, b"go\n" * 3)
    os.close(held)
