"""``wald read`` over a reclaimed range: an error, or a line on stderr and a distinct exit code."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from logs import SECOND_NS, START_NS, Built
from running import output_of, refusal_of, wald

from wald.files.ledger_write import Ledger
from wald.format.names import Kind


def fill(path: Path) -> Built:
    """Build a log of records 1 to 20, alternating between a and b, four per segment and second; reclaim 1 to 8."""
    built = Built(path / "root")
    for base in range(1, 21, 4):
        for number in range(base, base + 4):
            built.lines("ab"[number % 2 == 0], [b"%d" % number])
            built.now_ns -= SECOND_NS
        built.now_ns += SECOND_NS
        built.cut()
    built.seal()
    for route in "ab":
        built.log.set_cursor(route, 8)
    for base in (1, 5):
        built.reclaim(base)
    return built


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return fill(tmp_path_factory.mktemp("shared"))


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(START_NS / SECOND_NS + seconds, UTC).isoformat()


THERE = b"9\n11\n13\n15\n17\n19\n"


@pytest.mark.parametrize(
    ("options", "first", "last", "records"),
    [
        (["--from", 1], 1, 8, 4),
        (["--from", 3, "--to", 12], 3, 8, 3),
        (["--from", 2, "--to", 6], 2, 6, 4),
        (["--from", moment(0)], 1, 8, 4),
        (["--from", moment(1.5)], 5, 8, 2),
        (["--from", moment(0), "--to", moment(2)], 1, 4, 2),
        (["--from", 5, "--to", 100], 5, 8, 2),
        (["--on-missing", "error"], 1, 8, 4),
    ],
)
def test_from_a_place_that_was_named_it_is_an_error(
    shared: Built, options: list[object], first: int, last: int, records: int
) -> None:
    """No record is printed, so the rest cannot be mistaken for the whole range; cursors do not matter."""
    assert wald("read", "a", *options, "--root", shared.root.path).stdout == b""
    code, message, hint = refusal_of("read", "a", *options, "--root", shared.root.path)
    assert code == 3
    assert f"RECLAIM has removed records {first} to {last}: " in message
    assert f"{records} record" in message
    assert "of route a" in message
    assert "hint" not in hint


FOUR = "RECLAIM has removed records 1 to 8: 4 records of route a are missing"
TWO = "removed records 1 to 2: up to 2 records of route a are missing"
ABSENT = "wald: group new has no cursor on route a: reading begins at the oldest record"


@pytest.mark.parametrize(
    ("options", "code", "found", "reported"),
    [
        (["a"], 12, THERE, (FOUR, "read a --from 9")),
        (["a", "--from", "earliest"], 12, THERE, (FOUR, "read a --from 9")),
        (["a", "--to", 100], 12, THERE, (FOUR, "read a --from 9")),
        (["a", "--group", "new"], 12, THERE, (ABSENT, FOUR, "read a --from 9")),
        (["--limit", 1], 12, b"9\n", ("8 records are missing", "--from 9")),
        (["a", "--to", 2], 12, b"", (TWO, "where 1")),
        *((["a", "--from", at, "--on-missing", "skip"], 0, THERE, (FOUR,)) for at in ("1", moment(0), "earliest")),
        *((["a", "--from", at], 0, THERE, ()) for at in (8, 9, moment(2.5), "cursor")),  # 8 is of another route
        (["a", "--from", "end"], 0, b"", ()),
    ],
)
def test_what_is_missing_is_reported_where_no_place_was_named(
    shared: Built, options: list[object], code: int, found: bytes, reported: tuple[str, ...]
) -> None:
    done = wald("read", *options, "--root", shared.root.path)
    assert (done.returncode, done.stdout) == (code, found)
    lines = done.stderr.decode().splitlines()
    assert len(lines) == len(reported) + (lines != [] and code == 0)
    assert [words for words, line in zip(reported, lines, strict=False) if words not in line] == []


def test_hints_and_refusals_of_a_range(shared: Built) -> None:
    # An end before the start is refused where one is a time.
    for options in (["--from", 9, "--to", moment(0)], ["--from", moment(3.5), "--to", 9]):
        code, message, _ = refusal_of("read", "a", *options, "--root", shared.root.path)
        assert (code, "the end is before the start" in message) == (2, True)
    assert output_of("read", "a", "--from", 9, "--to", moment(3.5), "--root", shared.root.path) == b"9\n11\n"
    gone = refusal_of("read", "a", "--from", moment(0), "--to", 8, "--root", shared.root.path)
    assert gone[0] == 3, "what was reclaimed may be of that time"

    # The hint keeps the other options.
    others = ("--to", 15, "--limit", 2, "--format", "json")
    hint = refusal_of("read", "a", "--from", 1, *others, "--root", shared.root.path)[2]
    typed = hint.partition("to read the rest: ")[2].split()
    assert typed[0] == "wald"
    assert output_of(*typed[1:]) == output_of("read", "a", "--from", 9, *others, "--root", shared.root.path)


def test_cursors_archives_and_ledgers_decide_what_a_reader_is_told(tmp_path: Path) -> None:
    # The hint keeps the group whose cursor is to move.
    built = fill(tmp_path)
    root = built.root.path
    done = wald("read", "a", "--group", "fresh", "--commit", "--limit", 1, "--root", root)
    hint = next(line for line in done.stderr.decode().splitlines() if "--from 9" in line)
    output_of(*hint.partition("to read the rest: wald ")[2].split())
    cursors = {group: built.log.cursor("a", group).sequence for group in ("fresh", "processed")}
    assert cursors == {"fresh": 9, "processed": 8}

    # A cursor among reclaimed records is an error and stays where it is.
    assert wald("cursor", "set", "a", 4, "--rewind", "--root", root).returncode == 0
    for options in (["--commit"], ["--from", "cursor"], ["--group", "processed"]):
        code, message, hint = refusal_of("read", "a", *options, "--root", root)
        assert (code, "records 5 to 8: 2 records of route a" in message) == (3, True)
        assert "cursor set a 8 --group processed" in hint
    assert output_of("cursor", "get", "a", "--root", root) == b"4\n"
    done = wald("read", "a", "--commit", "--on-missing", "skip", "--root", root)
    assert (done.returncode, done.stdout) == (0, THERE)
    assert output_of("cursor", "get", "a", "--root", root) == b"19\n"

    # An archive that has them is in the hint.
    ledger = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    reported = {"event": "archived", "group": "archive", "bag": "x", "bundle": "y", "after": 0}
    ledger.append(reported | {"route": "b", "dest": "/elsewhere", "first": 2, "last": 8})
    ledger.append(reported | {"route": "a", "dest": "/cold store", "first": 1, "last": 7})
    ledger.close()
    hint = refusal_of("read", "a", "--from", 3, "--format", "json", "--root", root)[2]
    assert hint.startswith(
        "to restore them: wald-archive restore '/cold store' a --from 3 --to 7 --format json; to read the rest: wald "
    )
    hint = refusal_of("read", "a", "--from", 3, "--to", 6, "--root", root)[2]
    assert hint == "to restore them: wald-archive restore '/cold store' a --from 3 --to 6"

    # A front that no ledger explains is damage.
    (built.root.ledger / "reclaim.jsonl").unlink()
    done = wald("read", "a", "--root", root)
    assert (done.returncode, done.stdout) == (4, THERE)
    assert b"records 1 to 8 are missing, and no ledger explains why" in done.stderr
    assert b"verify" in done.stderr


def test_commit_ends_at_damage_with_the_cursor_in_front_of_it(tmp_path: Path) -> None:
    """A cursor beyond the damage would let RECLAIM delete the segment; the operator decides about that."""
    built = Built(tmp_path / "root")
    for line in (b"one", b"two", b"three"):
        built.lines("a", [line])
    path = built.path(1, Kind.RAW)
    path.write_bytes(path.read_bytes().replace(b"two\n", b"twx\n"))
    root = built.root.path
    for given in (b"one\n", b""):
        done = wald("read", "a", "--commit", "--root", root)
        assert (done.returncode, done.stdout) == (4, given)
        assert b"to skip the damage: wald --root " in done.stderr
        assert output_of("cursor", "get", "a", "--root", root) == b"1\n"
    assert wald("read", "a", "--group", "other", "--root", root).stdout == b"one\nthree\n"
    output_of("cursor", "set", "a", 2, "--root", root)
    assert output_of("read", "a", "--commit", "--root", root) == b"three\n"
