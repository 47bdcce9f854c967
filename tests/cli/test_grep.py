"""``wald read --grep``: output, exit codes, memory, and a comparison with a filter over a random log."""

import json
import os
import random
import re
import shlex
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from damage import flip_bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built
from running import command, launched, output_of, refusal_of, wald
from shrinking import shrink

from wald.cli.read import read
from wald.errors import Damaged, InvalidInput, NotFound, Partial, WaldError
from wald.format.names import Kind
from wald.format.records import Record
from wald.format.times import utc
from wald.reading import search as portions
from wald.reading.selection import Start
from wald.retention.missing import Missing
from wald.segments.sealed_file import compress_segment
from wald.writing import sealing

PARTS = [b"err", b"or", b"Err", b"%d", b"\r\x00\xff", b" " * 60, b""]
OTHERS = ["or", "%d", "\\r", "\\x00", "", "^$", "e.r", "[Ee]rr?or$", "(?i)ERR", "or|%", "\udcff", "nowhere"]
PATTERNS = ["error"] * 6 + OTHERS
ROUTES = "abpq"  # lines, columns, and two routes with split records

parts = st.sampled_from(PARTS)
values = st.lists(parts | st.lists(parts, max_size=4).map(b"".join), min_size=1, max_size=4)
pieces = st.permutations([b"err", b"or", b" "]) | values
kinds = st.sampled_from(["lines", "columns", "begin", "go on", "end", "stop", "cut", "seal"])
steps = st.tuples(kinds, values) | st.tuples(st.just("pieces"), pieces)
spoiled = st.sampled_from(["", "flip", "shrink", "reclaim"])


@dataclass(frozen=True)
class Asked:
    """The arguments of one search; times are commit numbers."""

    pattern: str
    fixed: bool
    ignore_case: bool
    invert: bool
    route: str | None
    first: int | None
    last: int | None
    since: int | None
    until: int | None


asked = st.builds(
    Asked,
    st.sampled_from(PATTERNS),
    *[st.booleans()] * 3,
    st.none() | st.sampled_from(ROUTES),
    *[st.none() | st.integers(1, 30)] * 4,
)


def append(log: Built, kind: str, given: list[bytes], numbers: defaultdict[str, int]) -> None:
    """Apply one step of a history if it is possible."""
    numbers[kind] += 1
    route = "pq"[numbers[kind] % 2]
    is_open = route in log.writer.state.open_records
    text = b"\n".join([*given[:-1], given[-1] or b"x"])
    if kind == "lines":
        log.lines("a", given)
    elif kind == "columns":
        log.columns("b", given, keys=[b"error", *[None] * (len(given) - 1)])
    elif kind == "begin" and not is_open:
        log.piece(route, text, begins=True, ends=False)
    elif kind == "go on" and is_open:
        log.piece(route, given[0] or b"x", begins=False, ends=False)
    elif kind == "end" and is_open:
        log.piece(route, text + b"\n", begins=False, ends=True)
    elif kind == "stop":
        log.piece(route, text, begins=not is_open, ends=True)
    elif kind == "pieces" and not is_open:
        for place, piece in enumerate(given):
            log.piece(route, piece or b"x", begins=place == 0, ends=False)
        log.piece(route, b"\n", begins=False, ends=True)
    elif kind == "cut":
        cut(log)
    elif kind == "seal":
        cut(log)
        log.seal()


def cut(log: Built) -> None:
    """Start a new segment unless the active one is empty."""
    if log.last >= log.writer.base_sequence:
        log.cut()


def spoil(log: Built, how: str, place: float) -> None:
    """Damage, shrink or reclaim a sealed segment, if one exists."""
    sealed = [segment for segment in log.view.segments if segment.kind is Kind.SEALED]
    if not sealed:
        return
    segment = sealed[int(place * 997) % len(sealed)]
    if how == "flip":
        flip_bit(segment.path, int(place * segment.path.stat().st_size))
    elif how == "shrink":
        shrink(log, segment.base_sequence, a=1000, p=int(place * 20))
    elif how == "reclaim" and len(log.view.segments) > 1:
        log.reclaim(sealed[0].base_sequence)


def time_of(commit: int) -> datetime:
    return datetime.fromtimestamp((START_NS + commit * SECOND_NS) / 1e9, UTC)


def expected(log: Built, asked: Asked) -> tuple[int | None, list[Record]]:
    """Filter every record; return the exit code, or None if it depends on the matches, and the matching records."""
    damage: list[Damaged] = []
    missing: list[Missing] = []
    start: Start = asked.first or (time_of(asked.since) if asked.since else "earliest")
    stop = asked.last or (time_of(asked.until) if asked.until else None)
    if (asked.first and asked.last and asked.first > asked.last) or (
        asked.since and asked.until and not asked.first and not asked.last and asked.since > asked.until
    ):
        return InvalidInput.exit_code, []
    flags = re.IGNORECASE if asked.ignore_case else 0
    pattern = os.fsencode(asked.pattern)
    search = re.compile(re.escape(pattern) if asked.fixed else pattern, flags).search
    records = log.log.records(asked.route, start, stop, on_damage=damage.append, on_missing=missing.append)
    found = [record for record in records if (search(record.value) is None) == asked.invert]
    if any(each.asked for each in missing):
        return NotFound.exit_code, []
    return Damaged.exit_code if damage else Partial.exit_code if missing else None, found


def arguments(log: Built, asked: Asked, *more: str) -> list[str]:
    positions = {
        "--from": asked.first,
        "--to": asked.last,
        "--since": asked.since and not asked.first and time_of(asked.since).isoformat(),
        "--until": asked.until and not asked.last and time_of(asked.until).isoformat(),
    }
    given = [word for option, value in positions.items() if value for word in (option, str(value))]
    flags = ["-F"] * asked.fixed + ["-i"] * asked.ignore_case + ["-v"] * asked.invert
    return ["--root", str(log.root.path), *given, *flags, *more, "--grep", asked.pattern, *filter(None, [asked.route])]


def run(words: list[str]) -> tuple[int, bytes]:
    """Run the command in this process, so that small portions can be patched in; return exit code and stdout."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with open(1, "w", closefd=False) as text, redirect_stdout(text):
                code = read.main(words, standalone_mode=False)
        except WaldError as error:
            code = error.exit_code
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return code, file.read()


def by_route(records: list[Record], show: Callable[[Record], bytes]) -> dict[str, list[bytes]]:
    """Map each route to the output of its records, in order."""
    shown: dict[str, list[bytes]] = {}
    for record in records:
        shown.setdefault(record.route, []).append(show(record))
    return shown


def text(record: Record) -> bytes:
    return b"%d %b %b" % (record.sequence, record.route.encode(), record.value)


def timed(record: Record) -> bytes:
    time = utc(record.append_time_ns, 9).encode()
    return b"%d %b %b %b" % (record.sequence, record.route.encode(), time, record.value)


def printed(output: bytes) -> dict[str, list[bytes]]:
    lines = output.split(b"\n")
    assert lines.pop() == b""
    shown: dict[str, list[bytes]] = {}
    for line in lines:
        shown.setdefault(line.split(b" ")[1].decode(), []).append(line)
    return shown


def objects(output: bytes) -> dict[str, list[dict[str, object]]]:
    shown: dict[str, list[dict[str, object]]] = {}
    for line in output.splitlines():
        found = json.loads(line)
        assert found.pop("sender")
        shown.setdefault(found["route"], []).append(found)
    return shown


def as_json(record: Record) -> dict[str, object]:
    fields: dict[str, object] = json.loads(record.to_json())
    return {"append_time": utc(record.append_time_ns, 9)} | fields


def assert_exact(log: Built, asked: Asked, jobs: str) -> None:
    try:
        code, records = expected(log, asked)
    except WaldError as error:  # a position that does not exist
        code, records = error.exit_code, []
    code = (0 if records else 1) if code is None else code
    counted = run(arguments(log, asked, "--jobs", jobs, "-c"))
    assert counted[0] == code
    if code in (2, 3):
        return
    assert counted[1] == b"%d\n" % len(records)
    for more, show in (([], text), (["--times"], timed)):
        ended, output = run(arguments(log, asked, "--jobs", jobs, "--prefix", *more))
        assert (ended, printed(output)) == (code, by_route(records, show))
    ended, output = run(arguments(log, asked, "--jobs", jobs, "--format", "json", "--times"))
    whole = {route: [as_json(each) for each in records if each.route == route] for route in ROUTES}
    assert (ended, objects(output)) == (code, {route: found for route, found in whole.items() if found})


def assert_all_exact(jobs: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        history=st.lists(steps, min_size=3, max_size=14),
        frame_bytes=st.integers(150, 900),
        level=st.sampled_from([-1, 3, 19]),
        keep=st.integers(0, 1),
        spoiled=spoiled,
        place=st.floats(0, 0.99),
        searches=st.lists(asked, min_size=3, max_size=3),
    )
    def exact(
        history: list[tuple[str, list[bytes]]],
        frame_bytes: int,
        level: int,
        keep: int,
        spoiled: str,
        place: float,
        searches: list[Asked],
    ) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(portions, "PORTION_BYTES", 1)  # each frame becomes one portion
            compress = partial(compress_segment, frame_bytes=frame_bytes, level=level)
            patch.setattr(sealing, "compress_segment", compress)
            log = Built(Path(folder) / "log")
            numbers: defaultdict[str, int] = defaultdict(int)
            log.lines("a", [b"error"])
            for kind, given in history:
                append(log, kind, given, numbers)
            cut(log)
            log.seal(keep=keep)
            log.lines("a", [b"the last error"])
            spoil(log, spoiled, place)
            for search in searches:
                assert_exact(log, search, jobs)
            log.crash()

    exact()


@pytest.mark.parametrize("jobs", ["1", pytest.param("4", marks=pytest.mark.slow)])
def test_it_finds_what_a_look_at_every_record_finds(jobs: str) -> None:
    assert_all_exact(jobs, 25)


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


def test_it_prints_matches_and_ends_as_grep_and_read_do(built: Built) -> None:
    # It prints sequence route and record.
    root = built.root.path
    assert found(root, "d") == b"3 a second \xff\x00\n"
    assert found(root, "error", "-i") == b"1 a first error\n4 b An ERROR\n"
    assert found(root, "[a-z]", "-v", "a") == b"2 a \n"
    assert found(root, "\\xff", "--times").split(b" ", 3)[::3] == [b"3", b"second \xff\x00\n"]
    assert output_of("read", "--root", root, "--grep", "error") == b"first error\n"
    assert output_of("read", "--root", root, "-c", "--grep", "r") == b"1\n"
    assert output_of("read", "--root", root, "-c", "-n", 1, "--grep", "r") == b"1\n"
    assert output_of("read", "--root", root, "b", "--prefix") == b"4 b An ERROR\n5 b nothing\n"

    # Options that exclude each other are refused.
    for options in (["-i"], ["-c"], ["--jobs", "2"], ["--grep", "x", "-c", "-f"]):
        assert refusal_of("read", "--root", root, *options)[0] == 2

    # The hint on an invalid pattern finds it literally.
    for pattern in ("(", "-(", "it's ("):
        built.lines("a", [f"<{pattern}>".encode()])
        _, _, hint = refusal_of("read", "--root", root, "--grep", pattern)
        assert output_of(*shlex.split(hint.partition(" finds it literally")[0])[1:]) == f"<{pattern}>\n".encode()

    # Exit codes are those of grep and of read.
    assert code(root, "no such thing") == code(root, "no such thing", "-n", 1) == 1
    assert code(root, "error", "nosuchroute") == 3
    path = built.path(1, Kind.SEALED)
    flip_bit(path, path.stat().st_size // 10)
    damaged = wald("read", "--root", root, "--grep", "ERROR")
    assert (damaged.returncode, damaged.stdout) == (4, b"An ERROR\n")
    assert str(path).encode() in damaged.stderr
    built.reclaim(1)
    rest = wald("read", "--root", root, "--grep", "ERROR")
    assert (rest.returncode, rest.stdout) == (12, b"An ERROR\n")
    assert b"RECLAIM has removed records 1 to 3" in rest.stderr
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
