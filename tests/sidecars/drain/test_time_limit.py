"""``wald-drain --time-limit``: a command that exceeds the limit is killed with its children; the try has failed."""

import json
import os
from pathlib import Path

import pytest
from draining import cursor, drain
from running import Daemon, eventually, output_of

OPTIONS = pytest.mark.parametrize("options", [("--workers", 2), ("--batch-records", 1)], ids=["workers", "one"])


@pytest.fixture(autouse=True)
def records(daemon: Daemon) -> None:
    """Records 1 and 2 on route a."""
    output_of("route", "add", "a", "--root", daemon.root)
    output_of("append", "a", "--root", daemon.root, stdin=b"slow\nfast\n")


def fed(root: Path, options: tuple[object, ...], script: str, *arguments: object) -> str:
    """Return the report of a drain that gives up a record after one failure."""
    limits = ("--time-limit", "1s", "--tries", 1, "--exit-at-end")
    done = drain("a", "--root", root, *options, *limits, "--", "sh", "-c", script, "sh", *arguments)
    assert done.returncode == 10, done.stderr.decode()
    assert cursor(root) >= 2
    return done.stderr.decode()


def ends(path: Path) -> None:
    """Return once the process whose pid is in the file has exited."""
    number = int(path.read_text())
    eventually(lambda: not os.path.exists(f"/proc/{number}") or "State:\tZ" in _status(number))


def _status(number: int) -> str:
    try:
        return Path(f"/proc/{number}/status").read_text()
    except OSError:
        return ""


@OPTIONS
def test_what_takes_too_long_is_a_failed_try(daemon: Daemon, options: tuple[object, ...]) -> None:
    """This applies even if the command then exits 0; records that it handles in time are processed."""
    said = fed(daemon.root, options, "read x; [ $x = fast ] || { trap 'exit 0' TERM; while :; do sleep 0.1; done; }")

    assert "a 1: time limit of 1.0 s, try 1 of 1" in said
    assert "a 2: " not in said
    (letter,) = output_of("read", "dead_letter", "--format", "json", "--root", daemon.root).splitlines()
    assert json.loads(letter)["headers"]["wald.reason"] == "time limit of 1.0 s after 1 try"


@pytest.mark.slow
@OPTIONS
def test_a_command_that_ignores_sigterm_is_killed(daemon: Daemon, tmp_path: Path, options: tuple[object, ...]) -> None:
    script = "read x; [ $x = fast ] && exit 0; trap '' TERM; echo $$ > $1/pid; while :; do sleep 0.1; done"
    assert "a 1: time limit of 1.0 s, try 1 of 1" in fed(daemon.root, options, script, tmp_path)
    ends(tmp_path / "pid")


@pytest.mark.slow
@OPTIONS
def test_what_the_command_has_started_is_ended_too(daemon: Daemon, tmp_path: Path, options: tuple[object, ...]) -> None:
    """This includes a process that ignores SIGTERM while its parent does not."""
    started = 'trap "" TERM; echo $$ > $1/pid; while :; do sleep 0.1; done'
    script = f"read x; [ $x = fast ] && exit 0; (exec sh -c '{started}' sh $1) & sleep 1000"
    assert "a 1: time limit of 1.0 s, try 1 of 1" in fed(daemon.root, options, script, tmp_path)
    ends(tmp_path / "pid")


def test_a_command_that_ends_in_time_is_not_touched(daemon: Daemon) -> None:
    done = drain("a", "--root", daemon.root, "--time-limit", "60s", "--exit-at-end", "--", "cat")
    assert (done.returncode, done.stdout) == (0, b"slow\nfast\n")
