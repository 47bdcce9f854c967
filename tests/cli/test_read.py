"""``wald read``: selection of records, output formats, and commits of the cursor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from running import Daemon, command, eventually, launched, output_of, refusal_of, wald

NUMBERS = b"".join(b"%d\n" % number for number in range(1, 101))


@pytest.fixture
def log(daemon: Daemon, root: Path) -> Path:
    """A log with records 1 to 100 on route a, half of them sealed and half active."""
    lines = NUMBERS.splitlines(keepends=True)
    output_of("append", "a", "--root", root, stdin=b"".join(lines[:50]))
    output_of("cut", "--root", root)
    eventually(lambda: list((root / "segments").glob("*.wal.zst")))
    output_of("append", "a", "--root", root, stdin=b"".join(lines[50:]))
    return root


def numbers(*arguments: object) -> list[int]:
    return [int(line) for line in output_of("read", "a", *arguments).split()]


def test_everything_is_read_once_and_in_order(log: Path) -> None:
    assert output_of("read", "a", "--root", log) == NUMBERS
    assert output_of("read", "--root", log) == NUMBERS


def test_a_cursor_is_set_behind_all_that_is_older_than_a_time(log: Path) -> None:
    reported = json.loads(output_of("where", 51, "--json", "--root", log))
    at = datetime.fromtimestamp(reported["append_time_ns"] // 1000 / 1e6, UTC).isoformat()

    assert output_of("cursor", "set", "a", at, "--root", log) == b"50\n"
    assert output_of("cursor", "set", "a", "1h", "--rewind", "--root", log) == b"0\n"
    assert output_of("cursor", "set", "a", "0s ago", "--root", log) == b"100\n"


def test_commit_moves_the_cursor_and_the_next_read_continues(log: Path) -> None:
    assert numbers("--commit", "--limit", "30", "--root", log) == list(range(1, 31))
    assert output_of("cursor", "get", "a", "--root", log) == b"30\n"
    assert numbers("--commit", "--limit", "30", "--root", log) == list(range(31, 61))
    assert numbers("--from", "cursor", "--root", log) == list(range(61, 101))
    assert output_of("cursor", "get", "a", "--root", log) == b"60\n"


def test_groups_do_not_see_each_other(log: Path) -> None:
    first = wald("read", "a", "--commit", "--group", "g1", "--limit", "5", "--root", log)
    assert (first.returncode, first.stdout) == (0, b"1\n2\n3\n4\n5\n")
    assert b"group g1 is new on route a" in first.stderr
    other = wald("read", "a", "--group", "g2", "--limit", "2", "--root", log)
    absent = b"wald: group g2 has no cursor on route a: reading begins at the oldest record\n"
    assert (other.returncode, other.stdout, other.stderr) == (0, b"1\n2\n", absent)
    assert output_of("cursor", "get", "a", "--group", "g1", "--root", log) == b"5\n"
    assert refusal_of("cursor", "get", "a", "--group", "g2", "--root", log)[0] == 3


def test_reading_again_does_not_move_the_cursor_back(log: Path) -> None:
    output_of("cursor", "set", "a", 70, "--root", log)

    assert numbers("--from", "1", "--limit", "10", "--commit", "--root", log) == list(range(1, 11))
    assert output_of("cursor", "get", "a", "--root", log) == b"70\n"


def test_follow_waits_for_more_and_commits_when_idle(log: Path) -> None:
    """Records appended later are read, and the cursor moves past them even if no more arrive."""
    with launched(
        command("read", "a", "--from", "101", "--follow", "--commit", "--root", log), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        output_of("append", "a", "--root", log, stdin=b"101\n102\n")
        assert [process.stdout.readline(), process.stdout.readline()] == [b"101\n", b"102\n"]
        eventually(lambda: wald("cursor", "get", "a", "--root", log).stdout == b"102\n")
        process.send_signal(signal.SIGINT)

    assert process.returncode == 130


def test_a_closed_pipe_ends_read_quietly(log: Path) -> None:
    """``wald read | head`` prints no error, exits like a process killed by SIGPIPE, and commits no unwritten record."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("read", "a", "--commit", "--root", log), stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)

    assert (done.returncode, done.stderr) == (141, b"")
    assert refusal_of("cursor", "get", "a", "--root", log)[0] == 3


def test_damage_is_reported_and_the_rest_is_read(log: Path, daemon: Daemon) -> None:
    """The exit code is 4, stderr names path and offset, and every record after the damage is printed."""
    daemon.stop()
    path = next((log / "segments").glob("*.wal.zst"))
    with path.open("r+b") as file:
        file.seek(100)
        file.write(bytes(byte ^ 0xFF for byte in os.pread(file.fileno(), 8, 100)))
    done = wald("read", "a", "--root", log)

    assert done.returncode == 4
    assert done.stdout == b"".join(NUMBERS.splitlines(keepends=True)[50:])
    message, hint = done.stderr.decode().splitlines()
    assert str(path) in message
    assert "offset" in message
    assert "hint: to list all damage: wald --root" in hint
