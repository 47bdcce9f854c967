"""``wald read --grep``: output, exit codes and memory use."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from damage import flip_bit
from logs import SECOND_NS, START_NS, Built
from running import command, launched, output_of, refusal_of, wald

from wald.format.names import Kind
from wald.format.times import utc

LOG_BYTES = 160 << 20
MEMORY_MAX_BYTES = 128 << 20


def found(root: Path, pattern: str, *options: object) -> bytes:
    return output_of("read", "--root", root, "--prefix", *options, "--grep", pattern)


def code(root: Path, pattern: str, *options: object) -> int:
    return wald("read", "--root", root, *options, "--grep", pattern).returncode


@pytest.fixture
def built(tmp_path: Path) -> Built:
    log = Built(tmp_path / "log")
    log.lines("a", [b"first error", b"", b"second \xff\x00"])
    log.cut()
    log.seal()
    log.columns("b", [b"An ERROR", b"nothing"], keys=[b"key", None])
    return log


def test_it_prints_sequence_route_and_record(built: Built) -> None:
    root = built.root.path
    assert found(root, "d") == b"3 a second \xff\x00\n"
    assert found(root, "error", "-i") == b"1 a first error\n4 b An ERROR\n"
    assert found(root, "[a-z]", "-v", "a") == b"2 a \n"
    assert found(root, "\\xff", "--times").split(b" ", 3)[::3] == [b"3", b"second \xff\x00\n"]
    assert output_of("read", "--root", root, "--grep", "error") == b"first error\n"
    assert output_of("read", "--root", root, "-c", "--grep", "r") == b"1\n"
    assert output_of("read", "--root", root, "-c", "-n", 1, "--grep", "r") == b"1\n"
    assert output_of("read", "--root", root, "b", "--prefix") == b"4 b An ERROR\n5 b nothing\n"


@pytest.mark.parametrize("options", [["-i"], ["-c"], ["--jobs", "2"], ["--grep", "x", "-c", "-f"]])
def test_options_that_exclude_each_other_are_refused(built: Built, options: list[str]) -> None:
    assert refusal_of("read", "--root", built.root.path, *options)[0] == 2


@pytest.mark.parametrize("pattern", ["(", "-(", "it's ("])
def test_the_hint_on_an_invalid_pattern_finds_it_literally(built: Built, pattern: str) -> None:
    built.lines("a", [f"<{pattern}>".encode()])
    _, _, hint = refusal_of("read", "--root", built.root.path, "--grep", pattern)

    assert output_of(*shlex.split(hint.partition(" finds it literally")[0])[1:]) == f"<{pattern}>\n".encode()


def test_exit_codes_are_those_of_grep_and_of_read(built: Built) -> None:
    root = built.root.path
    assert code(root, "no such thing") == code(root, "no such thing", "-n", 1) == 1
    assert code(root, "error", "nosuchroute") == 3

    path = built.path(1, Kind.SEALED)
    flip_bit(path, path.stat().st_size // 10)
    damaged = wald("read", "--root", root, "--grep", "ERROR")
    assert (damaged.returncode, damaged.stdout) == (4, b"An ERROR\n")
    assert str(path).encode() in damaged.stderr

    built.reclaim(1)
    partial = wald("read", "--root", root, "--grep", "ERROR")
    assert (partial.returncode, partial.stdout) == (12, b"An ERROR\n")
    assert b"RECLAIM has removed records 1 to 3" in partial.stderr
    assert code(root, "ERROR", "--from", "2") == 3
    assert code(root, "ERROR", "--from", "2", "--on-missing", "skip") == 0


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["--grep", "An "], b"4 b An ERROR\n6 a An error\n"),
        (["-iF", "--grep", "an e", "a", "--until", utc(START_NS + 60 * SECOND_NS, 9)], b"6 a An error\n"),
        (["-v", "-c", "--to", "99", "--grep", "-An"], b"3\n"),
    ],
)
@pytest.mark.parametrize("start", [["--from", "1"], []])
def test_the_hint_on_reclaimed_records_searches_the_rest(
    built: Built, options: list[str], output: bytes, start: list[str]
) -> None:
    built.lines("a", [b"An error"])
    built.reclaim(1)
    done = wald("read", "--root", built.root.path, "--prefix", *start, *options)
    *_, hint = done.stderr.decode().rpartition("hint: ")

    assert done.returncode == (3 if start else 12)
    assert output_of(*shlex.split(hint.removeprefix("to read the rest: "))[1:]) == output


def test_a_closed_pipe_ends_it_quietly(built: Built) -> None:
    built.lines("a", [b"x" * 1000] * 2000)
    line = command("read", "--root", built.root.path, "--grep", "x")
    with launched(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()

        assert process.stderr.read() == b""
        assert process.wait() == 141


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children, counting shared pages once (proportional set size)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = 0
    for each in (str(pid), *children):
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
        found += sum(int(kib) << 10 for kib in re.findall(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE))
    return found


@pytest.mark.slow
def test_its_processes_stay_within_128_mib_where_every_record_is_found(tmp_path: Path) -> None:
    log = Built(tmp_path / "log", segment_max_bytes=32 << 20)
    chance = random.Random(1)
    lines = [b"%d GET /%x.html 200" % (chance.getrandbits(40), chance.getrandbits(200)) for _ in range(1500)]
    for number in range(LOG_BYTES // sum(map(len, lines))):
        log.lines("a", lines)
        if number % 256 == 255:
            log.cut()
    log.cut()
    log.seal()
    log.crash()

    seen: list[int] = []
    words = command("read", "--root", log.root.path, "--jobs", 2, "--prefix", "--grep", "GET")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 20):
            seen.append(memory_bytes(process.pid))

    assert process.returncode == 0
    assert len(seen) > LOG_BYTES >> 20
    assert max(seen) <= MEMORY_MAX_BYTES, seen
