"""``wald grep``: what it prints, and how it ends."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from logs import SECOND_NS, START_NS, Built
from running import command, launched, output_of, refusal_of, wald

from wald.format.names import Kind
from wald.format.times import utc


def typed(hint: str, behind: str) -> list[str]:
    """The arguments of the command that a hint begins with."""
    return shlex.split(hint.partition(behind)[0])[1:]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    log = Built(tmp_path / "log")
    log.lines("a", [b"first error", b"", b"second \xff\x00"])
    log.cut()
    log.seal()
    log.columns("b", [b"An ERROR", b"nothing"], keys=[b"key", None])
    return log


def test_it_prints_sequence_route_and_record_as_it_is(built: Built) -> None:
    assert output_of("grep", "--root", built.root.path, "d") == b"3 a second \xff\x00\n"
    assert output_of("grep", "--root", built.root.path, "-i", "error") == b"1 a first error\n4 b An ERROR\n"
    assert output_of("grep", "--root", built.root.path, "-v", "[a-z]", "a") == b"2 a \n"
    assert output_of("grep", "--root", built.root.path, "\\xff", "--times").split(b" ", 3)[::3] == [
        b"3",
        b"second \xff\x00\n",
    ]
    assert output_of("grep", "--root", built.root.path, "-c", "r") == b"1\n"


def test_a_fixed_string_is_no_regular_expression(built: Built) -> None:
    built.lines("a", [b"a.c", b"abc"])

    assert output_of("grep", "--root", built.root.path, "-F", "a.c") == b"6 a a.c\n"
    assert refusal_of("grep", "--root", built.root.path, "(")[0] == 2


@pytest.mark.parametrize("pattern", ["(", "-(", "it's ("])
def test_the_hint_on_what_is_no_regular_expression_finds_it_as_it_is(built: Built, pattern: str) -> None:
    built.lines("a", [f"<{pattern}>".encode()])
    _, _, hint = refusal_of("grep", "--root", built.root.path, "--", pattern)

    assert output_of(*typed(hint, " finds it literally")) == f"6 a <{pattern}>\n".encode()


def test_json_has_what_wald_read_has_of_the_record(built: Built) -> None:
    (found,) = map(json.loads, output_of("grep", "--root", built.root.path, "--json", "An").splitlines())
    read = json.loads(output_of("read", "--root", built.root.path, "--from", "4", "--limit", "1", "--format", "json"))
    count = json.loads(output_of("grep", "--root", built.root.path, "--json", "-c", "An"))

    about = {"schema": "wald.grep/1", "kind": "record", "append_time": utc(read["append_time_ns"], 9)}
    assert found | {"sender": read["sender"]} == about | read
    assert count == {"schema": "wald.grep/1", "kind": "count", "records": 1}


def test_only_records_between_two_places_are_looked_at(built: Built) -> None:
    built.lines("a", [b"later"])
    root = built.root.path

    assert output_of("grep", "--root", root, "", "--from", "4", "--to", "4") == b"4 b An ERROR\n"
    assert wald("grep", "--root", root, "", "--until", utc(START_NS - 1, 9)).returncode == 1
    assert refusal_of("grep", "--root", root, "", "--from", "4", "--since", "1h")[0] == 2


def test_exit_codes_are_those_of_grep_and_of_read(built: Built) -> None:
    root = built.root.path
    assert wald("grep", "--root", root, "no such thing").returncode == 1
    assert wald("grep", "--root", root, "error", "nosuchroute").returncode == 3

    path = built.path(1, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[len(data) // 10] ^= 1
    path.write_bytes(data)
    damaged = wald("grep", "--root", root, "ERROR")
    assert (damaged.returncode, damaged.stdout) == (4, b"4 b An ERROR\n")
    assert str(path).encode() in damaged.stderr

    built.reclaim(1)
    partial = wald("grep", "--root", root, "ERROR")
    assert (partial.returncode, partial.stdout) == (12, b"4 b An ERROR\n")
    assert b"RECLAIM has removed records 1 to 3" in partial.stderr
    assert wald("grep", "--root", root, "ERROR", "--from", "2").returncode == 3


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["An "], b"4 b An ERROR\n6 a An error\n"),
        (["-iF", "an e", "a", "--until", utc(START_NS + 60 * SECOND_NS, 9)], b"6 a An error\n"),
        (["-v", "-c", "--to", "99", "--", "-An"], b"3\n"),
    ],
)
@pytest.mark.parametrize("start", [["--from", "1"], []])
def test_the_hint_on_reclaimed_records_searches_what_there_is(
    built: Built, options: list[str], output: bytes, start: list[str]
) -> None:
    built.lines("a", [b"An error"])
    built.reclaim(1)
    done = wald("grep", "--root", built.root.path, *start, *options)
    *_, hint = done.stderr.decode().rpartition("hint: ")

    assert done.returncode == (3 if start else 12)
    assert output_of(*shlex.split(hint.removeprefix("to read the rest: "))[1:]) == output


def test_a_reader_that_goes_away_ends_it_quietly(built: Built) -> None:
    built.lines("a", [b"x" * 1000] * 2000)
    with launched(
        command("grep", "--root", built.root.path, "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()

        assert process.stderr.read() == b""
        assert process.wait() == 141
