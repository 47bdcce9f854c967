"""Pattern search, in parallel too, and the start of a route's last records, compared with a look at every record."""

import os
import random
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from shrinking import shrink

from wald.errors import Damaged
from wald.format.batch import BatchHeader, Encoding
from wald.format.names import Kind
from wald.reading import pattern as patterns
from wald.reading import search as portions
from wald.reading.assembler import Batch
from wald.reading.latest import start_of_latest
from wald.reading.pattern import BadPattern, Matcher
from wald.reading.search import Event, Match, search
from wald.reading.selection import Start, Stop, select
from wald.retention.missing import Missing

END = b"\x1e"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Return a log with sealed segments that share records, a cut and an active one; each frame is a portion."""
    monkeypatch.setattr(portions, "PORTION_BYTES", 1)
    log = Built(tmp_path / "log")
    log.lines("a", [b"first error", b"", b"second \xff\x00"])
    log.columns("b", [b"an error\nin two lines", b"nothing"], keys=[b"error", None])
    log.piece("a", b"one er", begins=True, ends=False)
    log.lines("b", [b"between"], cut=True)
    log.piece("a", b"ror in three ", begins=False, ends=False)
    log.lines("b", [b"meanwhile"], cut=True)
    log.piece("a", b"pieces\n", begins=False, ends=True)
    log.lines("b", [b"Error"] * 3)
    log.cut(seal=True)
    log.lines("a", [b"error of a cut segment"], cut=True)
    log.lines("a", [b"error of the active one", b"the end"])
    return log


def searched(
    log: Built,
    pattern: bytes,
    *,
    jobs: int,
    route: str | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
) -> list[Event]:
    matcher = Matcher(pattern)

    def show(batch: Batch) -> Match:
        lines = [
            b"%d %b %b%b" % (sequence, batch.route.encode(), value, END)
            for sequence, value in matcher.find_matches(batch)
        ]
        return Match(len(lines), b"".join(lines))

    selection = select(log.view, route, start, stop, "processed")
    return list(search(log.view, selection, show, cannot_match=matcher.cannot_match, jobs=jobs))


def lines_of(events: list[Event], route: str | None = None) -> list[bytes]:
    """Return the records found, in the order of each route."""
    lines = b"".join(event.output for event in events if isinstance(event, Match)).split(END)[:-1]
    assert sum(event.records for event in events if isinstance(event, Match)) == len(lines)
    return [line for line in lines if route is None or line.split()[1] == route.encode()]


def expected(log: Built, pattern: bytes, route: str, first: int = 1, last: int = 1000) -> list[bytes]:
    records = [each for each in log.log.records(route) if first <= each.sequence <= last]
    found = [record for record in records if re.search(pattern, record.value)]
    return [b"%d %b %b" % (each.sequence, each.route.encode(), each.value) for each in found]


@pytest.mark.parametrize("jobs", [1, 3])
def test_it_finds_what_a_look_at_every_record_finds(built: Built, jobs: int) -> None:
    for pattern in (b"error", b"^$", b"er+or", b"\\d|n$", b"", b"one error in three pieces"):
        found = searched(built, pattern, jobs=jobs)

        assert lines_of(found, "a") == expected(built, pattern, "a")
        assert lines_of(found, "b") == expected(built, pattern, "b")
        assert lines_of(found)
        assert all(isinstance(event, Match) for event in found)
    for first, last in ((2, 5), (6, 6), (7, 11), (12, 99)):
        found = searched(built, b"", jobs=jobs, route="a", start=first, stop=last)
        assert lines_of(found) == expected(built, b"", "a", first, last)


@pytest.mark.parametrize("jobs", [1, 2])
def test_damage_is_reported_where_it_is_and_the_rest_is_found(built: Built, jobs: int) -> None:
    whole = expected(built, b"error|Error", "b") + expected(built, b"error|Error", "a")
    path = built.path(1, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[len(data) // 10] ^= 1
    path.write_bytes(data)

    events = searched(built, b"error|Error", jobs=jobs)
    damage = [event for event in events if isinstance(event, Damaged)]

    assert damage[0].message.startswith(str(path))
    assert damage[0].hint
    assert isinstance(events[-1], Match)
    assert lines_of(events) == [line for line in whole if int(line.split()[0]) > 7]


def test_a_process_that_is_killed_ends_the_search_with_an_error(built: Built) -> None:
    parent = os.getpid()

    def show(_: Batch) -> Match:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return Match(0, b"")

    selection = select(built.view, None, "earliest", None, "processed")
    with pytest.raises(OSError, match="a search process was killed"):
        list(search(built.view, selection, show, cannot_match=lambda _: False, jobs=2))


def test_what_is_dropped_or_lost_is_reported_whatever_is_looked_for(built: Built) -> None:
    built.cut()
    first = built.lines("a", [b"dropped"])
    built.lines("b", [b"kept"], cut=True)
    built.piece("lost", b"nobody goes on with", begins=True, ends=False)
    built.cut()
    built.append("lost", b"another one\n", 1)
    built.cut(seal=True)
    shrink(built, first, a=first)

    events = [searched(built, each, jobs=1) for each in (b"", b"nobody", b"[?]")]
    for of in events:
        assert [(each.first, each.last) for each in of if isinstance(each, Missing)] == [(first, first)]
        (damage,) = [str(each) for each in of if isinstance(each, Damaged)]
        assert "a piece of record" in damage


PIECES = [b"ab", b"aB", b"b", b"\n", b".", b"error", b"Error", b"\x00", b"\xff", b""]
PATTERNS = [
    b"ab", b"^b", b"b$", b"^$", b"a.", b"error|ab", b"(?i)ERROR", b"(?i:E)rror", b"e+rror", b"(er)ror", b"(er)?ror",
    b"[^a]b", b"\\x00", b"a(?!b)", b"b(?=\\Z)", b"\\bb", b"(?s)a.*b", b"", b"(?x) a b", b"er{2}or", b"(?:e|a)rror",
]  # fmt: skip


def batch(values: list[bytes], *, terminated: bool = True) -> Batch:
    payload = b"\n".join(values) + b"\n" * terminated
    header = BatchHeader(0, len(payload), 7, 5, 0, 0, len(values), 1, Encoding.LINES, 0, 1)
    return Batch("a", 7, 6 + len(values), memoryview(payload), terminated, header, 1, 64)


lines = st.lists(st.lists(st.sampled_from([piece for piece in PIECES if piece != b"\n"])).map(b"".join), min_size=1)


@pytest.mark.parametrize("lines_searched", [1, 1 << 30])  # by their places in the batch wherever possible, or never
@settings(max_examples=100, deadline=None)
@given(
    values=lines,
    pattern=st.sampled_from(PATTERNS) | st.lists(st.sampled_from(PIECES)).map(b"".join).map(re.escape),
    ignore_case=st.booleans(),
    invert=st.booleans(),
    terminated=st.booleans(),
)
def test_a_matcher_finds_what_a_look_at_every_record_finds(
    lines_searched: int, values: list[bytes], pattern: bytes, ignore_case: bool, invert: bool, terminated: bool
) -> None:
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    expected = [(7 + i, value) for i, value in enumerate(values) if (compiled.search(value) is None) == invert]

    matcher = Matcher(pattern, ignore_case=ignore_case, invert=invert)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "_LINES_SEARCHED", lines_searched)
        found = list(matcher.matching_records(batch(values, terminated=terminated)))

    assert [(record.sequence, record.value) for record in found] == expected
    assert [record.terminated for record in found] == [terminated or n < 6 + len(values) for n, _ in expected]


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(BadPattern, match="missing \\)"):
        Matcher(b"(")


LAST = (1 << 64) - 1


@pytest.fixture(scope="module")
def eleven_segments(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Eleven segments, sealed, cut and active; route rare is in two of them; lines in pieces, and columns."""
    chance = random.Random(7)
    eleven_segments = Built(tmp_path_factory.mktemp("latest") / "log")
    for number in range(10):
        for _ in range(chance.randrange(1, 6)):
            eleven_segments.lines("a", [b"%d" % chance.randrange(30) for _ in range(chance.randrange(1, 900))])
            eleven_segments.columns("b", [b"x", b"7"])
        if number in (2, 7):
            eleven_segments.lines("rare", [b"r1", b"r7", b"r3"])
        eleven_segments.piece("a", b"begins here", begins=True, ends=False)
        eleven_segments.piece("a", b", and ends\n", begins=False, ends=True)
        eleven_segments.cut()
        if number < 7:
            eleven_segments.seal()
    eleven_segments.lines("b", [b"1", b"2", b"3"])
    return eleven_segments


@pytest.mark.parametrize(
    ("route", "last", "pattern"),
    [
        ("a", LAST, None),
        ("a", "middle", b"7"),
        ("b", LAST, b"7"),
        ("b", 3, None),
        ("rare", LAST, None),
        (None, LAST, b"7"),
    ],
)
def test_the_last_records_are_found_from_behind(
    eleven_segments: Built, route: str | None, last: int | str, pattern: bytes | None
) -> None:
    upto = eleven_segments.last // 2 if last == "middle" else int(last)
    matcher = None if pattern is None else Matcher(pattern)
    every = [
        record.sequence
        for record in eleven_segments.log.records(route)
        if record.sequence <= upto and (matcher is None or matcher.matches(record.value))
    ]
    for count in (0, 1, 2, 3, 20, 1000, 10**6):
        found = matcher.matching_records if matcher else None
        start = start_of_latest(eleven_segments.view, route, count, last=upto, find_records=found)
        assert [sequence for sequence in every if sequence >= start] == (every[-count:] if count else []), count
