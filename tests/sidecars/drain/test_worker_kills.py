"""Killed processes of workers: no record runs in two commands at once or is lost, and done records stay done."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from contents import records
from draining import Start, await_line, cursor, drain
from jobs import ONCE, VALUES, Jobs
from logs import Built
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, refusal_of, wald
from tracing import traced

from wald import Consumer, WorkGroup
from wald.errors import Locked
from wald.files.disk import Disk
from wald.files.locks import is_locked
from wald_drain.process import StateFile


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


def await_more(jobs: Jobs, lines: int) -> None:
    """Return once commands have written more than this number of lines."""
    eventually(lambda: len(jobs.lines) > lines)


@pytest.mark.parametrize("workers", [1, 6])
def test_a_start_waits_for_all_commands_and_uses_their_exit_codes(
    built: Built, jobs: Jobs, start: Start, workers: int
) -> None:
    """It does so with fewer workers as well as with more; a signal ends the wait."""
    jobs.hold(1, 2, 3, 4)
    jobs.fail(3)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 4)), 1, 2, 3, 4)
    ended = start(*jobs.arguments(built.root.path, "--workers", workers))
    await_line(ended, "waits for the command")
    ended.send_signal(signal.SIGTERM)
    assert ended.wait(TIMEOUT_SECONDS) == 0
    second = start(*jobs.arguments(built.root.path, "--workers", workers, "--exit-at-end"))
    await_line(second, "waits for the command that an earlier wald-drain has left running")
    jobs.let_go(1, 2, 3)
    eventually(lambda: set(jobs.running) == {"4"})
    jobs.mend(3)
    jobs.let_go(4)

    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20
    assert len(jobs.tries(3)) == 2


def test_what_a_running_command_has_is_not_released_but_its_end_is_named(
    built: Built, jobs: Jobs, start: Start
) -> None:
    """With the option in the message, a second command starts concurrently."""
    jobs.hold(1)
    drain = start(*jobs.arguments(built.root.path, "--workers", 1))
    jobs.await_running(1)
    line = ("group", "release", "a", "processed", "worker-1", "--root", built.root.path)
    code, message, hint = refusal_of(*line)
    assert (code, f"worker-1 of a/processed runs process {jobs.running['1'].pid}, with its" in message) == (9, True)
    ending = hint.partition(" ends it")[0].rpartition("kill -- -")[2]
    assert os.getpgid(jobs.running["1"].pid) == int(ending)
    assert output_of(*line, "--force") == b"a/processed: released from worker-1: 1 record\n"
    os.killpg(int(ending), signal.SIGKILL)
    await_line(drain, "a 1: killed by SIGKILL, try 1")


def test_no_program_delivers_what_a_command_has_that_was_left_running(built: Built, jobs: Jobs, start: Start) -> None:
    """The error names the command. Skipping its record is possible, since that delivers nothing.

    The group is not removed either: without it, the next start would not wait for the command.
    """
    jobs.hold(1, 3)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 2)), 1, 3)
    openings = (lambda: WorkGroup(built.root.path, "a"), lambda: next(iter(Consumer(built.root.path, "a"))))
    for opening in openings:
        with pytest.raises(Locked, match="a command that a killed wald-drain left running") as refused:
            opening()
        assert f"process {jobs.running['1'].pid}, since " in refused.value.hint
        assert f"kill -- -{jobs.running['1'].pid} ends it: sh " in refused.value.hint
    removing = ("group", "remove", "a", "processed", "--root", built.root.path)
    code, message, hint = refusal_of(*removing)
    assert (code, "kill -- -" in hint) == (5, True)
    assert "a command that a killed wald-drain left running still has records of route a" in message
    assert output_of("group", "skip", "a", "processed", "1", "--root", built.root.path).endswith(b"1 record of 1\n")
    jobs.let_go(1, 3)
    files = list(built.root.cursor_directory("a").glob("processed.command*"))
    eventually(lambda: not any(is_locked(each, Disk()) for each in files))
    with WorkGroup(built.root.path, "a") as work:
        assert 3 in [record.sequence for record, _ in work.lease("x", wait=5)]  # only wald-drain reads its exit code
    assert wald(*removing).returncode == 0


def test_halves_are_told_apart(built: Built, jobs: Jobs, start: Start) -> None:
    """Only the half of the leased batch that the surviving command had is done."""
    jobs.fail(1)
    jobs.hold("from-5")
    first = start(*jobs.arguments(built.root.path, "--workers", 1, "--batch-records", 8))
    eventually(lambda: {line.values for line in jobs.running.values()} == {("5", "6", "7", "8")})
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    jobs.mend(1)
    jobs.let_go("from-5")
    assert drain(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end")).returncode == 0

    assert jobs.processed == ONCE


def test_a_command_that_is_killed_is_a_failed_try(built: Built, jobs: Jobs, start: Start) -> None:
    """Its record is retried immediately, and all others continue."""
    jobs.hold(2)
    process = start(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end"))
    jobs.await_running(2)
    os.kill(jobs.running["2"].pid, signal.SIGKILL)
    await_line(process, "a 2: killed by SIGKILL, try 1, retrying in 0.1 s")
    jobs.let_go(2)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert jobs.tries(2) == [1, 2]
    assert cursor(built.root.path) == 20


def test_a_command_may_kill_its_process_group(built: Built, jobs: Jobs, start: Start) -> None:
    """The keeper is outside the group and reports the exit status."""
    marker = jobs.folder / "killed"
    script = f"[ $WALD_FIRST != 2 ] || [ -e {marker} ] || {{ touch {marker}; kill -KILL 0; }}"
    done = drain("a", "--root", built.root.path, "--workers", 2, "--exit-at-end", "--", "sh", "-c", script)

    assert done.returncode == 0
    assert done.stderr == b"wald-drain: a 2: killed by SIGKILL, try 1, retrying in 0.1 s\n"


def test_a_signal_to_all_processes_of_a_drain_lets_commands_finish(built: Built, jobs: Jobs, start: Start) -> None:
    """Ctrl-C in its terminal has the same effect, since it does not reach the commands."""
    jobs.hold(*VALUES)
    process = start(*jobs.arguments(built.root.path, "--workers", 2))
    jobs.await_running(1, 2)
    keepers = [jobs.running[value].keeper for value in ("1", "2")]
    for each in (*map(parent_of, keepers), *keepers, process.pid):
        os.kill(each, signal.SIGINT)
    jobs.let_go(*VALUES)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert {"1", "2"} <= set(jobs.processed) <= {"1", "2", "3", "4"}
    assert cursor(built.root.path) == len(jobs.processed)


def test_a_runner_that_cannot_fork_ends_the_drain(built: Built, jobs: Jobs, start: Start, tmp_path: Path) -> None:
    """The record it had just leased does not count as tried, even at the next start."""
    jobs.hold(1)
    process = start(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end"))
    jobs.await_running(1)
    runner = parent_of(jobs.running["1"].keeper)
    with traced(runner, tmp_path / "trace", "trace=clone,clone3,fork", "inject=clone,clone3,fork:error=EAGAIN:when=1"):
        jobs.let_go(1)
        await_line(process, "sh: Resource temporarily unavailable")
        assert process.wait(TIMEOUT_SECONDS) == 1
    assert drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end")).returncode == 0

    assert jobs.processed == ONCE
    assert jobs.tries(2) == [1]


@pytest.mark.parametrize("tries", [(), ("--tries", 1)])
def test_a_killed_keeper_leaves_the_record_with_its_command(
    built: Built, jobs: Jobs, start: Start, tries: tuple[object, ...]
) -> None:
    """Once the command exits, the record is retried; its exit code is unknown, so this was not a failed try."""
    jobs.hold(2)
    process = start(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end", *tries))
    jobs.await_running(2)
    os.kill(jobs.running["2"].keeper, signal.SIGKILL)
    await_line(process, f": waits for the command whose keeper was killed: process {jobs.running['2'].pid}, since ")
    eventually(lambda: len(jobs.processed) == 19)
    assert jobs.tries(2) == [1]
    jobs.let_go(2)
    await_line(process, "a 2: its keeper was killed, so its exit code is unknown, retrying in 0.1 s")

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert jobs.tries(2) == [1, 1]
    assert jobs.processed == ONCE | {"2": 2}


def test_a_killed_keeper_is_no_try_at_the_next_start_either(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(2)
    first = start(*jobs.arguments(built.root.path, "--workers", 2))
    jobs.await_running(2)
    os.kill(jobs.running["2"].keeper, signal.SIGKILL)
    await_line(first, ": waits for the command whose keeper was killed")
    eventually(lambda: len(jobs.processed) == 19)  # a record that is about to be tried would count as a failed try
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    jobs.let_go(2)
    assert drain(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end", "--tries", 1)).returncode == 0

    assert jobs.tries(2) == [1, 1]
    assert cursor(built.root.path) == 20


def test_failed_tries_outlive_a_killed_drain(built: Built, jobs: Jobs, start: Start) -> None:
    """Each try counts once, whether it is in the journal or only in the last report of the command."""
    jobs.fail(2)
    first = start(*jobs.arguments(built.root.path, "--workers", 1))
    eventually(lambda: jobs.tries(2) == [1, 2])
    jobs.hold(2)
    eventually(lambda: jobs.tries(2) == [1, 2, 3])
    eventually(lambda: set(jobs.running) == {"2"})
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    jobs.let_go(2)
    second = start(*jobs.arguments(built.root.path, "--workers", 1))
    await_line(second, "a 2: exit 1, try 3, in an earlier wald-drain")
    eventually(lambda: len(jobs.tries(2)) == 5)
    second.send_signal(signal.SIGTERM)

    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.tries(2)[:5] == [1, 2, 3, 4, 5]


def test_a_batch_that_failed_is_no_try_of_its_records_at_the_next_start(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.fail(1)
    jobs.hold(4)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 1, "--batch-records", 4)), 1, 2, 3, 4)
    jobs.let_go(4)
    eventually(lambda: not jobs.running)
    jobs.mend(1)
    done = drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert jobs.tries(1) == [1]


def test_a_failed_try_of_a_record_that_was_skipped_is_not_reported(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.fail(1)
    jobs.hold(1)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 1)), 1)
    jobs.let_go(1)
    eventually(lambda: not jobs.running)
    output_of("group", "skip", "a", "processed", "1", "--why", "it has teeth", "--root", built.root.path)
    done = drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert jobs.processed == {value: 1 for value in VALUES if value != "1"}


def kill_all(process: subprocess.Popen[bytes], jobs: Jobs, value: str) -> None:
    """Kill a drain with one worker, its command that has ``value``, and all processes between, like the OOM killer."""
    command = jobs.running[value]
    runner = parent_of(command.keeper)
    for each in (process.pid, runner, command.keeper, command.pid):
        os.kill(each, signal.SIGKILL)
    process.wait(TIMEOUT_SECONDS)


def test_a_record_that_kills_all_of_its_drain_is_given_up(daemon: Daemon, jobs: Jobs, start: Start) -> None:
    """It gets the usual number of tries, counted over restarts."""
    output_of("route", "add", "a", "--root", daemon.root)
    output_of("append", "a", "--root", daemon.root, stdin=b"1\n2\n3\n")
    jobs.hold(2)
    words = ("a", "--root", daemon.root, "--workers", 1, "--tries", 2, "--exit-at-end", "--", *jobs.words)
    for number in (1, 2):
        process = start(*words)
        jobs.await_running(2)
        assert jobs.running["2"].number == number
        kill_all(process, jobs, "2")
        jobs.forget_running()
    done = drain(*words)

    assert done.returncode == 10
    assert b"a 2: killed with its wald-drain, try 2, in an earlier wald-drain, or with a full disk\n" in done.stderr
    assert jobs.tries(2) == [1, 2]
    assert jobs.processed == {"1": 1, "3": 1}
    (letter,) = records(daemon.root, "dead_letter")
    headers = json.loads(letter.headers or b"")
    assert (headers["wald.reason"], headers["wald.tries"]) == ("killed with its wald-drain after 2 tries", "2")


def test_a_command_that_never_started_is_no_failed_try(built: Built, jobs: Jobs) -> None:
    """Its drain was killed after it had written which record the command would get."""
    with WorkGroup(built.root.path, "a") as work:
        work.lease("worker-1", 1, wait=5)
    with StateFile(built.root, "a", "processed", 1, Disk()) as file:
        file.begin(7, [1], 1)
    done = drain(*jobs.arguments(built.root.path, "--workers", 1, "--tries", 1, "--exit-at-end"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert jobs.processed == ONCE


def test_what_the_journal_does_not_know_is_not_reported_as_processed(built: Built, jobs: Jobs, start: Start) -> None:
    """The record is redelivered, and the message reports that."""
    jobs.hold(1)
    jobs.kill_while_running(start(*jobs.arguments(built.root.path, "--workers", 1)), 1)
    (built.root.cursor_directory("a") / "processed.work").unlink()
    jobs.let_go(1)
    done = drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end"))

    assert done.returncode == 0
    assert jobs.processed == ONCE | {"1": 2}
    assert done.stderr.decode().endswith(  # a message about waiting for the command may precede
        "wald-drain: a 1: processed by a command that has outlived its wald-drain, or a full disk; processing it "
        "again, as the group's journal does not record it\n"
    )


def test_a_killed_runner_ends_the_drain_and_its_command_is_waited_for(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(1, 2)
    process = start(*jobs.arguments(built.root.path, "--workers", 2))
    jobs.await_running(1, 2)
    runner = parent_of(jobs.running["2"].keeper)
    assert parent_of(runner) == process.pid
    os.kill(runner, signal.SIGKILL)
    jobs.let_go(1)
    await_line(process, f"process {runner}, which starts its commands, was killed")

    assert process.wait(TIMEOUT_SECONDS) == 1
    successor = start(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end"))
    await_line(successor, "waits for the command that an earlier wald-drain has left running")
    jobs.let_go(2)
    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE


@pytest.mark.parametrize("order", ["log", "key"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_drain_that_is_killed_at_random_loses_and_repeats_nothing(
    built: Built, jobs: Jobs, start: Start, seed: int, order: str
) -> None:
    """Each record is part of one successful run, since every command outlives its drain."""
    chance = random.Random(seed)
    jobs.fail(5, 11)
    more = [str(number) for number in range(21, 61)]
    built.lines("a", [each.encode() for each in more])
    for _ in range(8):
        workers, batch = chance.randint(1, 4), chance.choice([1, 1, 3])
        process = start(
            *jobs.arguments(built.root.path, "--workers", workers, "--batch-records", batch, "--order", order)
        )
        await_more(jobs, len(jobs.lines) + chance.randint(0, 12))
        process.kill()
        process.wait(TIMEOUT_SECONDS)
    jobs.mend(5, 11)
    assert drain(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end", "--order", order)).returncode == 0

    assert jobs.running == {}
    assert jobs.processed == ONCE | dict.fromkeys(more, 1)
    assert cursor(built.root.path) == 60
