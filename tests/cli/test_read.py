"""``wald read``: selection of records, output formats, and commits of the cursor."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from running import Daemon, command, eventually, launched, output_of, refusal_of, wald

from wald.errors import InvalidInput

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


def test_a_read_takes_all_or_what_its_cursor_leaves(log: Path, daemon: Daemon) -> None:
    # Everything is read once and in order.
    assert output_of("read", "a", "--root", log) == NUMBERS
    assert output_of("read", "--root", log) == NUMBERS

    # A closed pipe ends read quietly.
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("read", "a", "--commit", "--root", log), stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")
    assert refusal_of("cursor", "get", "a", "--root", log)[0] == 3

    # Commit moves the cursor and the next read continues.
    assert numbers("--commit", "--limit", "30", "--root", log) == list(range(1, 31))
    assert output_of("cursor", "get", "a", "--root", log) == b"30\n"
    assert numbers("--commit", "--limit", "30", "--root", log) == list(range(31, 61))
    assert numbers("--from", "cursor", "--root", log) == list(range(61, 101))
    assert output_of("cursor", "get", "a", "--root", log) == b"60\n"

    # Reading again does not move the cursor back.
    output_of("cursor", "set", "a", 70, "--root", log)
    assert numbers("--from", "1", "--limit", "10", "--commit", "--root", log) == list(range(1, 11))
    assert output_of("cursor", "get", "a", "--root", log) == b"70\n"

    # A cursor is set behind all that is older than a time.
    reported = json.loads(output_of("where", 51, "--json", "--root", log))
    at = datetime.fromtimestamp(reported["append_time_ns"] // 1000 / 1e6, UTC).isoformat()
    assert output_of("cursor", "set", "a", "1h", "--rewind", "--root", log) == b"0\n"
    assert output_of("cursor", "set", "a", at, "--root", log) == b"50\n"
    assert output_of("cursor", "set", "a", "0s ago", "--root", log) == b"100\n"

    # Follow waits for more and commits when idle.
    with launched(
        command("read", "a", "--from", "101", "--follow", "--commit", "--root", log), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        output_of("append", "a", "--root", log, stdin=b"101\n102\n")
        assert [process.stdout.readline(), process.stdout.readline()] == [b"101\n", b"102\n"]
        eventually(lambda: wald("cursor", "get", "a", "--root", log).stdout == b"102\n")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130

    # Damage is reported and the rest is read.
    daemon.stop()
    path = next((log / "segments").glob("*.wal.zst"))
    with path.open("r+b") as file:
        file.seek(100)
        file.write(bytes(byte ^ 0xFF for byte in os.pread(file.fileno(), 8, 100)))
    reading = wald("read", "a", "--root", log)
    assert reading.returncode == 4
    assert reading.stdout == b"".join(NUMBERS.splitlines(keepends=True)[50:]) + b"101\n102\n"
    message, hint = reading.stderr.decode().splitlines()
    assert str(path) in message
    assert "offset" in message
    assert "hint: to list all damage: wald --root" in hint


def test_groups_do_not_see_each_other(log: Path) -> None:
    first = wald("read", "a", "--commit", "--group", "g1", "--limit", "5", "--root", log)
    assert (first.returncode, first.stdout) == (0, b"1\n2\n3\n4\n5\n")
    assert b"group g1 is new on route a" in first.stderr
    other = wald("read", "a", "--group", "g2", "--limit", "2", "--root", log)
    absent = b"wald: group g2 has no cursor on route a: reading begins at the oldest record\n"
    assert (other.returncode, other.stdout, other.stderr) == (0, b"1\n2\n", absent)
    assert output_of("cursor", "get", "a", "--group", "g1", "--root", log) == b"5\n"
    assert refusal_of("cursor", "get", "a", "--group", "g2", "--root", log)[0] == 3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log in which route a has records 1 to 30, all sealed, and 34 to 40; route b has 31 to 33."""
    with Daemon(tmp_path_factory.mktemp("shell") / "log") as daemon:
        root = daemon.root
        for route in ("a", "b", "empty"):
            output_of("route", "add", route, "--root", root)
        append(root, "a", range(1, 31))
        output_of("cut", "--root", root)
        eventually(lambda: list((root / "segments").glob("*.wal.zst")))
        append(root, "b", range(31, 34))
        append(root, "a", range(34, 41))
        output_of("cursor", "set", "a", 35, "--root", root)
        yield root


def append(root: Path, route: str, numbers: range) -> None:
    output_of("append", route, "--root", root, stdin=b"".join(b"%d\n" % number for number in numbers))


def read_of(root: Path, *options: object) -> list[int]:
    return [int(line) for line in output_of("read", *options, "--root", root).split()]


def time_of(root: Path, sequence: int) -> str:
    return str(json.loads(output_of("where", sequence, "--json", "--root", root))["append_time"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("a --from earliest --limit 60", [*range(1, 31), *range(34, 41)]),
        ("a --from end", []),
        ("a --from 41", []),
        ("a --from 29 --to 35", [29, 30, 34, 35]),
        ("a --limit 0", []),
        ("a --from 29 --limit 3", [29, 30, 34]),
        ("a --from 1970-01-01 --limit 2", [1, 2]),
        ("a --from 2300-01-01T00:00:00Z", []),
        ("a --to 1970-01-01T00:00:00+01:00", []),
        ("a -n 3", [38, 39, 40]),
        ("a --last 3", [38, 39, 40]),
        ("-n 9", [*range(32, 41)]),
        ("b -n 2", [32, 33]),
        ("b -n 20", [31, 32, 33]),
        ("a -n 9", [29, 30, *range(34, 41)]),
        ("a -n 0", []),
        ("empty -n 3", []),
        ("a -n 3 --to 30", [28, 29, 30]),
        ("a -n 3 --from 39", [39, 40]),
        ("a -n 3 --from 10 --to 11", [10, 11]),
        ("a -n 2 --from earliest", [39, 40]),
        ("a -n 2 --since 1h", [39, 40]),
        ("a -n 2 --until 1h", []),
        ("a -n 2 --since {34} --until {34}", []),
        ("a -n 2 --until {34}", [29, 30]),
        ("a -n 20 --since {34}", [*range(34, 41)]),
        ("a --since {34}", [*range(34, 41)]),
        ("a --since {34} --limit 2", [34, 35]),
        ("a --until {34}", [*range(1, 31)]),
        ("a --since yesterday --until now", [*range(1, 31), *range(34, 41)]),
        ("a --since 5m --to 3", [1, 2, 3]),
        ("a --from 3 --until {34} --limit 1", [3]),
        ("a --grep 7", [7, 17, 27, 37]),
        ("a --grep 7$ --limit 2", [7, 17]),
        ("a --grep ^1 --from 5 --to 12", [10, 11, 12]),
        ("a --grep 7 -n 2", [27, 37]),
        ("a --grep 7 -n 2 --to 36", [17, 27]),
        ("a --grep 7 -n 9 --since {34}", [37]),
        ("--grep 3.", [*range(30, 40)]),
        ("a --group processed", [*range(36, 41)]),
        ("a --group processed --since {34}", [*range(34, 41)]),
        ("a --from cursor --grep [02468]$", [36, 38, 40]),
    ],
)
def test_options_that_say_which_records_go_together(shared: Path, options: str, expected: list[int]) -> None:
    """``{34}`` is replaced with the time of record 34."""
    words = [re.sub(r"\{(\d+)\}", lambda found: time_of(shared, int(found[1])), word) for word in options.split()]

    assert read_of(shared, *words) == expected


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ("--since 1h --from 3", "--since and --from are mutually exclusive", "read a --from 3"),
        ("--until 1h --to 3", "--until and --to are mutually exclusive", "read a --to 3"),
        ("-n 5 --limit 5", "-n and --limit are mutually exclusive", "read a -n 5"),
        ("-n 5 --commit", "-n would skip records that the group has not read", "--limit 5"),
        ("-n 5 --group g", "-n would skip records that the group has not read", "--limit 5"),
        ("-n 5 --from cursor", "-n and --from cursor are mutually exclusive", "read a -n 5 --follow"),
        ("-n 5 --from end", "-n and --from end are mutually exclusive", "read a -n 5 --follow"),
        ("--since 250", "--since 250: a number alone is a sequence, not a time", "--since 5m"),
        ("--since end", "--since end: not a time", "--since yesterday"),
        ("--until noon", "--until noon: not a time", "--until 14:00"),
        ("--since 1h --until 2h", "--since 1h --until 2h: the end is before the start", "--from 2h --to 1h"),
        ("--grep (", "not a regular expression", "-F --grep '(' finds it literally"),
    ],
)
def test_options_that_exclude_each_other_are_refused(shared: Path, options: str, words: str, hint: str) -> None:
    code, message, advice = refusal_of("read", "a", *options.split(), "--root", shared)

    assert code == InvalidInput.exit_code
    assert words in message
    assert hint in advice


def test_times_precede_each_record_or_are_keys_and_are_accepted_as_input(shared: Path) -> None:
    # Times precede each record and are accepted as input.
    lines = output_of("read", "a", "--times", "-n", "8", "--root", shared).decode().splitlines()
    at, value = lines[1].split(" ")
    assert (at, value) == (time_of(shared, 34), "34")
    assert [line.split(" ")[1] for line in lines] == [str(number) for number in (30, *range(34, 41))]
    assert read_of(shared, "a", "--since", at) == [*range(34, 41)]

    # Times in json are keys which append takes back.
    line = output_of("read", "a", "--times", "--format", "json", "-n", "1", "--root", shared)
    record = json.loads(line)
    assert record["append_time"] == time_of(shared, 40)
    assert list(record)[:3] == ["append_time", "sequence", "route"]
    assert output_of("append", "empty", "--jsonl", "--root", shared, stdin=line) == b"41 41\n"


def test_a_value_with_newlines_has_one_time(daemon: Daemon, root: Path) -> None:
    output_of("append", "a", "--jsonl", "--root", root, stdin=b'{"value": "one\\ntwo"}\n')
    lines = output_of("read", "a", "--times", "--root", root).decode().splitlines()

    assert len(lines) == 2
    assert lines[0].endswith("Z one")
    assert lines[1] == "two"


def test_the_last_records_and_then_those_that_come(daemon: Daemon, root: Path) -> None:
    """``-n 2 -f`` works as in tail(1), and --grep filters the output."""
    append(root, "a", range(1, 10))
    line = command("read", "a", "-n", "2", "-f", "--grep", "[1-8]", "--root", root)
    with launched(line, stdout=subprocess.PIPE) as reading:
        assert reading.stdout is not None
        assert [reading.stdout.readline() for _ in range(2)] == [b"7\n", b"8\n"]
        append(root, "a", range(9, 12))
        assert [reading.stdout.readline() for _ in range(2)] == [b"10\n", b"11\n"]
        reading.terminate()


def test_a_commit_behind_a_limit_of_matches_leaves_the_rest_unread(daemon: Daemon, root: Path) -> None:
    append(root, "a", range(1, 31))
    assert read_of(root, "a", "--grep", "7", "--limit", "2", "--commit") == [7, 17]
    assert output_of("cursor", "get", "a", "--root", root) == b"17\n"
    assert read_of(root, "a", "--grep", "7", "--commit") == [27]
    assert output_of("cursor", "get", "a", "--root", root) == b"30\n"
