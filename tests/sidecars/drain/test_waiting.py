"""Messages about running commands and about commands that outlived their drain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draining import await_line
from jobs import Jobs
from logs import Built
from running import TIMEOUT_SECONDS, eventually, output_of

Start = Callable[..., subprocess.Popen[bytes]]
GROUP = "processed"


@pytest.fixture
def built(root: Path) -> Built:
    """Records 1 to 4 on route a, each with its sequence as value."""
    log = Built(root)
    log.lines("a", [b"1", b"2", b"3", b"4"])
    return log


def arguments(built: Built, jobs: Jobs, *options: object) -> list[object]:
    return ["a", "--root", built.root.path, *options, "--", *jobs.words]


def shown(built: Built) -> dict[str, Any]:
    return json.loads(output_of("group", "show", "a", GROUP, "--root", built.root.path, "--json"))  # type: ignore[no-any-return]


def text(built: Built, command: str = "show") -> str:
    words = ("a", GROUP) if command == "show" else ("a",)
    return output_of("group", command, *words, "--root", built.root.path).decode()


def test_a_group_shows_the_commands_of_its_workers(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(1, 2)
    began_ns = time.time_ns()
    process = start(*arguments(built, jobs, "--workers", 2))
    jobs.await_running(1, 2)
    commands = shown(built)["commands"]
    held = {line.worker: line.pid for line in jobs.running.values()}

    assert {each["worker"]: each["process"] for each in commands} == held
    assert [each["worker"] for each in commands] == [1, 2]
    for each in commands:
        assert each["command"] == " ".join(map(str, jobs.words))
        assert abs(each["started_ns"] - began_ns) < TIMEOUT_SECONDS * 10**9
        assert each["left"] is False
    assert f"worker-1: process {held[1]}, since 20" in text(built)
    assert "left running" not in text(built)
    assert "waits for" not in text(built, "list")
    process.terminate()


def test_what_a_start_waits_for_is_named_with_what_ends_it(built: Built, jobs: Jobs, start: Start) -> None:
    """The suggested command ends the process and its children."""
    jobs.hold(2)
    first = start(*arguments(built, jobs, "--workers", 2))
    jobs.await_running(2)
    eventually(lambda: len(jobs.processed) == 3)
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    command = jobs.running["2"].pid
    assert f"start its workers, which wait for process {command}\n" in text(built)
    second = start(*arguments(built, jobs, "--workers", 2, "--exit-at-end"))
    await_line(second, f"process {command}, since 20")
    eventually(lambda: f"kill -- -{command}\n" in text(built))

    assert [(each["process"], each["process_group"], each["left"]) for each in shown(built)["commands"]] == [
        (command, command, True)
    ]
    assert f"wait until process {command} has ended; to end it: kill -- -{command}\n" in text(built)
    assert ", left running by an earlier wald-drain: sh " in text(built)
    assert "  waits for a command: wald " in text(built, "list")
    jobs.let_go(2)
    os.killpg(command, signal.SIGTERM)
    assert second.wait(TIMEOUT_SECONDS) == 0
    assert shown(built)["commands"] == []


def test_a_process_that_a_command_left_in_the_background_is_waited_for_by_name(
    built: Built, jobs: Jobs, start: Start
) -> None:
    """The drain of the command was killed."""
    script = "sleep 1000 > /dev/null 2>&1 & echo $! > $1/sleeping; exit 0"
    first = start("a", "--root", built.root.path, "--", "sh", "-c", script, "sh", jobs.folder)
    eventually(lambda: built.log.cursor("a", GROUP).sequence == 4)
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    sleeping = int((jobs.folder / "sleeping").read_text())
    try:
        second = start("a", "--root", built.root.path, "--exit-at-end", "--", "true")
        await_line(second, f"process {sleeping}, since 20")
    finally:
        os.kill(sleeping, signal.SIGKILL)
    assert second.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize("options", [("--workers", 2), ("--batch-records", 1)])
def test_ctrl_c_says_what_it_waits_for_and_again_leaves_it(
    built: Built, jobs: Jobs, start: Start, options: tuple[object, ...]
) -> None:
    """The next start uses the exit codes of the commands that were left running."""
    jobs.hold(1)
    first = start(*arguments(built, jobs, *options))
    jobs.await_running(1)
    if options[0] == "--workers":
        eventually(lambda: len(jobs.processed) == 3)
    command = jobs.running["1"].pid
    first.send_signal(signal.SIGINT)
    await_line(
        first, f"stops once its commands have ended, process {command}; Ctrl-C again leaves them to the next start"
    )
    first.send_signal(signal.SIGINT)
    await_line(first, "interrupted; commands that run go on, and the next start waits for them")
    assert first.wait(TIMEOUT_SECONDS) == 130
    assert jobs.running["1"].pid == command
    second = start(*arguments(built, jobs, *options, "--exit-at-end"))
    await_line(second, f"process {command}, since 20")
    jobs.let_go(1)
    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == {"1": 1, "2": 1, "3": 1, "4": 1}


def test_a_signal_without_a_command_says_nothing(built: Built, jobs: Jobs, start: Start) -> None:
    process = start(*arguments(built, jobs, "--workers", 2))
    eventually(lambda: len(jobs.processed) == 4)
    eventually(lambda: not shown(built)["open_records"])
    eventually(lambda: shown(built)["commands"] == [])
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert process.stderr is not None
    assert b"stops once" not in process.stderr.read()
