"""The sequence floor: no sequence is issued again, even if an older backup was restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from contents import errors
from damage import peak_bytes
from effort import steps
from logs import Built
from running import Daemon, eventually, output_of

from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.routes import retire_route
from wald.format.head import CursorLines, encode_cursor
from wald.format.work import PAGE_RECORDS, Commit, FailureReason, JournalLine, JournalPage, JournalStart, encode_work
from wald.retention.cursors import CursorState, read_cursors
from wald.segments.view import State
from wald.writing import sequence_floor
from wald.writing.sequence_floor import find_floor, last_sealed

LAST = 10  # of the log
FAR = 1 << 50


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 to 10 of a, cut after 5."""
    built = Built(tmp_path / "root")
    for number in range(2):
        built.lines("a", [b"%d" % (5 * number + i) for i in range(5)])
        if not number:
            built.cut()
    return built


def put(root: Root, route: str, group: str, sequence: int, log_id: bytes | None) -> None:
    """A cursor as it came out of a backup."""
    root.cursor_directory(route).mkdir(parents=True, exist_ok=True)
    root.cursor(route, group).write_bytes(encode_cursor(CursorLines(sequence, log_id, 1, group, "2026-11-21")))


def tell(built: Built, name: str, line: Mapping[str, object]) -> None:
    """A line of a ledger, as its owner writes it."""
    built.ledger.close()
    ledger = Ledger(built.root.ledger / f"{name}.jsonl", built.disk)
    ledger.append(dict(line))
    ledger.close()


def again(built: Built) -> Built:
    """The next life, after a kill."""
    built.crash()
    return Built(built.root.path, epoch=2)


@pytest.mark.parametrize(("route", "group"), [("a", "processed"), ("other", "audit"), ("retired", "processed")])
def test_the_floor_is_above_the_cursors_of_every_route_and_group(built: Built, route: str, group: str) -> None:
    put(built.root, route, group, 45, built.log_id)
    if route == "retired":
        retire_route(built.root, built.disk, route, now="")
    following = again(built)

    assert following.lines("a", [b"new"]) == 46
    assert any("11 to 45 are skipped" in words for words in following.report.warnings)
    assert following.report.errors == []


@pytest.mark.parametrize(
    ("sequence", "ours", "believed"),
    [
        (LAST + (1 << 20), False, True),
        (LAST + 1 + (1 << 20), False, False),
        (LAST + 1 + (1 << 20), True, True),
        (LAST + (1 << 40), True, True),
        (FAR, True, False),
        (45, None, False),
    ],
    ids=["bare, near", "bare, far", "ours, farther", "ours, far", "ours, too far", "of another log"],
)
def test_a_number_is_believed_so_far_and_what_is_not_pins(
    built: Built, sequence: int, ours: bool | None, believed: bool
) -> None:
    put(built.root, "a", "g", sequence, {True: built.log_id, False: None, None: bytes(16)}[ours])
    following = again(built)

    assert following.lines("a", [b"new"]) == (sequence + 1 if believed else LAST + 1)
    if ours is not None and not believed:
        assert any("to be believed" in words for words in following.report.warnings)
    cursors = read_cursors(built.root, "a", log_id=built.log_id, head_sequence=following.last)
    assert [cursor.state is CursorState.VALID for cursor in cursors] == [believed]


def read_by_workers(built: Built, *lines: JournalLine, group: str = "g") -> None:
    """The journal of a work group as it came out of a backup, with its cursor."""
    put(built.root, "a", group, 1, built.log_id)
    data = b"".join(encode_work(line, 0) for line in lines)
    built.root.cursor("a", group).with_suffix(".work").write_bytes(data + b"\n" * 100)


def test_the_floor_is_above_what_workers_have_read(built: Built) -> None:
    """Some of them may be done: a new record with such a sequence would never be delivered."""
    begin = JournalStart(built.log_id, "a", "g", 1, 21)
    read_by_workers(built, begin)
    assert again(built).lines("a", [b"new"]) == 21

    read_by_workers(built, begin, Commit(read=[(21, 25), (31, 45)]), Commit(done=[(31, 31)]))
    assert Built(built.root.path, epoch=3).lines("a", [b"new"]) == 46


@pytest.mark.parametrize("tail", ["pages", "settled", "one long line"])
def test_a_start_reads_only_the_end_of_a_long_journal(built: Built, tail: str) -> None:
    """Up to the last line about records that were read, or to the snapshot that is in front of all such lines."""
    begin = JournalStart(built.log_id, "a", "g", 1, 21)
    pages = [JournalPage(number * PAGE_RECORDS, bytes([1]) * PAGE_RECORDS) for number in range(8_000)]
    taken_in, settled = Commit(read=[(21, 45)]), Commit(done=[(31, 31)])
    long = Commit(read=[(46, 46)], reasons=[FailureReason("x" * (150 << 10), 1, [])])
    lines = {"pages": [], "settled": [taken_in, *[settled] * 2_000], "one long line": [taken_in, long]}[tail]
    read_by_workers(built, begin, *pages, *lines)
    following = again(built)
    at = {"pages": 21, "settled": 46, "one long line": 47}[tail]

    assert following.lines("a", [b"new"]) == at
    length = (built.root.cursor_directory("a") / "g.work").stat().st_size
    assert peak_bytes(lambda: find_floor(built.root, log_id=built.log_id, next_sequence=following.last + 1)) < length
    assert length > 1 << 20


def test_a_journal_with_thousands_of_damaged_lines_is_not_believed(built: Built) -> None:
    begin = JournalStart(built.log_id, "a", "g", 1, 21)
    read_by_workers(built, begin, Commit(read=[(21, 45)]))
    journal = built.root.cursor("a", "g").with_suffix(".work")
    whole = journal.read_bytes().rstrip(b"\n")

    def effort(lines: int) -> int:
        journal.write_bytes(whole + b"\n" + b'"in": [\n' * lines)
        return steps(lambda: find_floor(built.root, log_id=built.log_id, next_sequence=LAST + 1))

    assert effort(60_000) < 2 * effort(2_000)
    assert find_floor(built.root, log_id=built.log_id, next_sequence=LAST + 1).last == LAST


def test_a_line_of_a_journal_that_is_too_long_is_not_decoded(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_floor, "_LINE_MAX_BYTES", 1 << 10)
    begin = JournalStart(built.log_id, "a", "g", 1, 21)
    long = Commit(read=[(46, 46)], reasons=[FailureReason("x" * (1 << 10), 1, [])])
    read_by_workers(built, begin, Commit(read=[(21, 45)]), long)
    assert find_floor(built.root, log_id=built.log_id, next_sequence=LAST + 1).last == 45


def test_a_journal_of_another_log_or_without_a_cursor_or_a_damaged_line_says_nothing(built: Built) -> None:
    begin = JournalStart(built.log_id, "a", "g", 1, LAST + 3)
    read_by_workers(built, begin, Commit(read=[(LAST + 3, 45)]))
    path = built.root.cursor("a", "g").with_suffix(".work")
    path.write_bytes(path.read_bytes().replace(b"45]", b"95]"))
    read_by_workers(built, replace(begin, log_id=bytes(16), end=70), group="foreign")
    read_by_workers(built, replace(begin, end=80), group="removed")
    built.root.cursor("a", "removed").unlink()

    assert again(built).lines("a", [b"new"]) == LAST + 3


@pytest.mark.parametrize("name", ["reclaim", "archive"])
def test_the_floor_is_above_what_ledgers_say_has_left_the_log(built: Built, name: str) -> None:
    line = {"event": "reclaimed" if name == "reclaim" else "archived", "base": 11, "first": 11, "last": 45}
    tell(built, name, line)

    assert again(built).lines("a", [b"new"]) == 46


@pytest.mark.parametrize("name", ["segments", "reclaim", "archive"])
def test_a_damaged_line_says_nothing(built: Built, name: str) -> None:
    """One flipped bit, and records that never were are lost for ever; the next lower number still counts."""
    event = {"segments": "sealed", "reclaim": "reclaimed", "archive": "archived"}[name]
    for last in (12, 13):
        tell(built, name, {"event": event, "base": 11, "last": last, "at": 1})
    path = built.root.ledger / f"{name}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"last":13', b'"last":93'))
    following = again(built)

    assert following.lines("a", [b"new"]) == 13


def test_damaged_lines_do_not_have_the_ledger_read_once_more_each(built: Built) -> None:
    ledger = Ledger(built.root.ledger / "segments.jsonl", built.disk)
    ledger.append(*({"event": "sealed", "base": last, "last": last} for last in range(100_000, 102_000)))
    ledger.close()
    path = built.root.ledger / "segments.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)

    def effort(damaged: int) -> int:
        whole = len(lines) - damaged
        spoiled = [line.replace(b'"crc":"', b'"crc":"z') for line in lines[whole:]]
        path.write_bytes(b"".join([*lines[:whole], *spoiled]))
        found = 0

        def find() -> None:
            nonlocal found
            found = last_sealed(built.root, next_sequence=1)

        counted = steps(find)
        assert found == 101_999 - damaged
        return counted

    assert effort(200) < 3 * effort(1)


def test_what_was_sealed_and_is_not_there_is_damage_and_its_numbers_are_not_given_out_again(built: Built) -> None:
    line = {"event": "sealed", "base": 11, "last": 45, "bytes": 1}
    tell(built, "segments", line)
    following = again(built)

    assert following.lines("a", [b"new"]) == 46
    assert any("acknowledged records 11 to 45 are missing" in words for words in following.report.errors)


def test_without_anything_above_the_end_nothing_is_passed_over(built: Built) -> None:
    built.log.set_cursor("a", LAST)

    assert find_floor(built.root, log_id=built.log_id, next_sequence=LAST + 1).reason == ""
    assert again(built).lines("a", [b"new"]) == LAST + 1


def test_after_a_restored_backup_every_new_record_is_delivered(tmp_path: Path) -> None:
    """The segments are older than the cursor: new records get higher sequences, and no command reports damage."""
    root = tmp_path / "root"
    built = Built(root)
    built.lines("a", [b"old"] * LAST)
    built.crash()
    put(built.root, "a", "processed", 45, built.log_id)
    put(built.root, "a", "slow", 3, built.log_id)
    with Daemon(root) as daemon:
        assert "11 to 45 are skipped" in daemon.log
        output_of("append", "a", "--root", root, stdin=b"new\n" * 5)
        eventually(lambda: daemon.ask("HEAD").startswith("OK seq=00000000000000000050 "))
        fresh = [record.sequence for record in built.log.records("a", start="cursor")]
        slow = [record.sequence for record in built.log.records("a", start="cursor", group="slow")]
        daemon.kill()
        daemon.start_again()
        assert daemon.stop() == 0

    assert fresh == [46, 47, 48, 49, 50]
    assert slow == [4, 5, 6, 7, 8, 9, 10, 46, 47, 48, 49, 50]
    assert errors(root) == []
    found = built.log.where(20)
    assert found.state is State.SKIPPED
    assert "skipped sequences 11 to 45" in found.message
    assert built.log.where(46).durable
