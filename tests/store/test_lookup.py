"""Look-ups of every sequence, the floor below which none is issued again, and pattern search."""

import os
import random
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from contents import errors
from damage import flip_bit, flipped, peak_bytes
from effort import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built, write_entries
from running import Daemon, eventually, output_of
from shrinking import shrink

from wald.errors import Damaged, InvalidInput
from wald.files.layout import Root
from wald.files.routes import retire_route
from wald.format.batch import BatchHeader, Encoding
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.format.work import PAGE_RECORDS, Commit, FailureReason, JournalLine, JournalPage, JournalStart, encode_work
from wald.reading import pattern as patterns
from wald.reading import search as portions
from wald.reading.assembler import Batch
from wald.reading.latest import start_of_latest
from wald.reading.pattern import BadPattern, Matcher
from wald.reading.search import Event, Match, search
from wald.reading.selection import Start, Stop, select
from wald.retention.cursors import CursorState, read_cursors
from wald.retention.missing import Missing
from wald.segments.sealed_file import SealedFile
from wald.segments.view import State
from wald.writing import sequence_floor
from wald.writing.sequence_floor import find_floor, last_sealed

BLANK = b"\n"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1–2 reclaimed, 3–4 released, 5–6 sealed, 7–8 cut, 9–10 active, 11 not durable."""
    built = Built(tmp_path / "root")
    for base in (1, 3, 5, 7, 9):
        built.lines("a", [b"x"])
        built.lines("b", [b"y"])
        if base < 9:
            built.cut()
    built.seal(keep=1)
    built.reclaim(1)
    built.reclaim(3, keep=True)
    built.lines("a", [b"z"], publish=False)
    return built


def test_each_state_is_reported_and_a_record_that_is_there_described(built: Built) -> None:
    reclaimed, sealed, never = State.RECLAIMED, State.SEALED, State.NEVER_ISSUED
    states = [reclaimed, reclaimed, State.RELEASED, State.RELEASED, sealed, sealed, State.CUT, State.CUT]
    expected = dict(enumerate([*states, State.ACTIVE, State.ACTIVE, never], start=1)) | {10**40: never}
    for sequence, state in expected.items():
        found = built.log.where(sequence)
        assert found.state is state
        assert found.message
        assert found.durable == (state not in (reclaimed, never))
    assert built.log.where(2).segment == "00000000000000000001.wal.zst"
    for wrong in (0, -1):
        with pytest.raises(InvalidInput):
            built.log.where(wrong)
    built.log.set_cursor("b", 5)
    built.log.set_cursor("b", 6, "archive")
    found = built.log.where(6)
    assert (found.route, found.segment) == ("b", "00000000000000000005.wal.zst")
    assert found.append_time_ns == START_NS + 6 * SECOND_NS
    assert found.processed == {"processed": False, "archive": True}
    with SealedFile(built.path(5, Kind.SEALED)) as opened:
        assert found.position == opened.index.batch_table().positions[1]


def test_a_record_that_workers_have_acknowledged_above_the_floor_is_processed(built: Built) -> None:
    """By the journal of the group; not by that of another one, or without a cursor that counts."""
    page, acked = JournalPage(0, bytes([1]) * PAGE_RECORDS), JournalPage(0, bytes([255]) * PAGE_RECORDS)
    behind, read, done = JournalPage(PAGE_RECORDS, bytes([1]) * PAGE_RECORDS), [(6, 6)], Commit(done=[(6, 6)])
    path = built.root.cursor("b", "g")

    def is_processed(*lines: JournalLine | bytes, route: str = "b") -> bool:
        data = [JournalStart(built.log_id, route, "g", 2, 100), *lines]
        journal = [line if isinstance(line, bytes) else encode_work(line, 0) for line in data]
        path.with_suffix(".work").write_bytes(b"".join(journal) + BLANK * 100)
        return built.log.where(6).processed["g"]

    built.log.set_cursor("b", 2, "g")
    for several in ([], [acked], [behind], [page, Commit(done=[(2, 6)])], [Commit(read=read), done]):
        assert is_processed(*several), several
        assert not is_processed(*several, route="a")
    for several in ([page], [page, Commit(done=[(2, 4)])], [Commit(read=read)], [page, BLANK, done]):
        assert not is_processed(*several), several
    path.write_text("no number\n")
    assert not is_processed(acked)


def test_damaged_bytes_are_quarantined(built: Built) -> None:
    position = built.log.where(8).position
    assert position is not None
    path = built.path(7, Kind.RAW)
    flip_bit(path, position + 70)
    found = built.log.where(8)
    assert found.state is State.QUARANTINED
    assert f"offset {position}" in found.message
    assert built.log.where(7).state is State.CUT


def test_a_sealed_file_is_quarantined_if_nothing_is_whole_or_it_is_not_there(built: Built) -> None:
    path = built.path(5, Kind.SEALED)
    whole = path.read_bytes()
    for length, state in ((-1, State.SEALED), (30, State.QUARANTINED)):
        path.write_bytes(whole[:length])
        assert built.log.where(6).state is state
    path.unlink()
    path.symlink_to("/nowhere")
    found = built.log.where(6)
    assert found.state is State.QUARANTINED
    assert str(path) in found.message
    path.unlink()
    found = built.log.where(5)
    assert (found.state, found.segment) == (State.UNKNOWN, path.name)
    shutil.rmtree(built.root.segments)
    with pytest.raises(Damaged, match="is gone"):
        built.log.where(1)


def archive(built: Built, *entries: dict[str, object]) -> None:
    common = {"event": "archived", "dest": "/tape/7", "bag": "x/1-4", "after": 0}
    tell(built, "archive", *(common | entry for entry in entries))


def test_a_bundle_and_the_member_in_it_are_told(built: Built) -> None:
    """Records of two routes took turns, so their bundles span the same numbers; one record is still in the log."""
    of_a, of_b = ({"path": f"x/1-4/data/{route}.tar", "runs": [n, 1, 1, 1]} for n, route in enumerate("ab"))
    parts = [[1, "a/records/1.txt"], [3, "a/records/3.txt"]]
    archive(
        built,
        {"route": "a", "first": 1, "last": 3, "parts": parts} | of_a,
        {"route": "b", "first": 2, "last": 4, "parts": [[2, "b/records/2.txt"]]} | of_b,
        {"route": "b", "first": 6, "last": 6, "path": of_b["path"], "after": 5, "parts": [[6, "b/records/6.txt"]]},
    )
    found = [built.log.where(sequence) for sequence in (1, 2, 6)]

    assert [each.state for each in found] == [State.ARCHIVED, State.ARCHIVED, State.SEALED]
    assert [each.route for each in found] == ["a", "b", "b"]
    assert found[1].bundle == found[2].bundle == "/tape/7/x/1-4/data/b.tar"
    assert found[1].member == "b/records/2.txt"
    assert "/tape/7/x/1-4/data/b.tar" in found[1].message
    assert found[0].reclaimed is not None
    assert found[2].reclaimed is None


def test_a_reclaimed_record_says_when_by_which_rule_and_under_which_cursors(built: Built) -> None:
    """Also by the rule of its route, and who had not read it."""
    at = "reclaimed at 2023-11-14T22:13:20Z by the rule"
    a, b = {"route": "a", "first": 1, "last": 1}, {"route": "b", "first": 2, "last": 2}
    line = {"event": "reclaimed", "base": 1, "last": 2, "at": START_NS}
    b_cursors = {"cursors": {"processed": 3, "audit": 2}}
    tell(built, "reclaim", line | {"rule": "max_age", "routes": [a | {"cursors": {"processed": 7}}, b | b_cursors]})
    found = built.log.where(2)
    assert (found.state, found.reclaimed and found.reclaimed["rule"]) == (State.RECLAIMED, "max_age")
    assert found.message == f"{at} 'max_age'; cursors: b/processed at 3, b/audit at 2"

    a |= {"rule": "read", "cursors": {"processed": 7}}
    b |= {"rule": "max_bytes", "cursors": {"processed": 0, "audit": 2}}
    tell(built, "reclaim", line | {"rule": "each_route", "lost": {"b": 1}, "routes": [a, b]})
    assert built.log.where(1).message == f"{at} 'read' of route a; cursors: a/processed at 7"
    assert built.log.where(2).message == (
        f"{at} 'max_bytes' of route b, though b/processed had not read it; cursors: b/processed at 0, b/audit at 2"
    )


def test_a_ledger_with_lines_that_make_no_sense_still_gives_an_answer(built: Built) -> None:
    archive(built, {"route": 7, "first": 1, "last": 2, "path": None, "runs": 3, "parts": "x"})
    line = {"event": "reclaimed", "base": 3, "last": 4, "at": "soon", "routes": [7, {"route": "a"}], "rule": []}
    tell(built, "reclaim", line, {"event": "reclaimed", "base": [1], "last": 2}, {"event": "kept", "base": {}})
    tell(built, "reclaim", {"event": "reclaimed", "base": 1, "last": 2, "at": 10**30, "routes": 5})

    assert [built.log.where(sequence).state for sequence in (1, 3)] == [State.ARCHIVED, State.RELEASED]


@pytest.mark.parametrize("name", ["reclaim.jsonl", "archive.jsonl", "segments.jsonl"])
def test_a_damaged_ledger_answers_nothing_about_what_is_gone_and_leaves_the_rest(built: Built, name: str) -> None:
    archive(built, {"route": "a", "first": 1, "last": 1, "bundle": "a.tar"})
    path = built.root.ledger / name
    path.write_bytes(flipped(path.read_bytes(), 99))
    with pytest.raises(Damaged, match=f"{name}: line 1: checksum mismatch"):
        built.log.where(1)

    found = built.log.where(5)
    assert found.state is State.SEALED
    assert found.message.endswith("wald cannot rely on this ledger") == (name != "segments.jsonl")
    assert f"{path}: line 1" in " ".join(errors(built.root.path))


LAST = 10  # of the log
FAR = 1 << 50


@pytest.fixture
def ten_records(tmp_path: Path) -> Built:
    """Records 1 to 10 of a, cut after 5."""
    ten_records = Built(tmp_path / "root")
    for number in range(2):
        ten_records.lines("a", [b"%d" % (5 * number + i) for i in range(5)])
        if not number:
            ten_records.cut()
    return ten_records


def put(root: Root, route: str, group: str, sequence: int, log_id: bytes | None) -> None:
    """A cursor as it came out of a backup."""
    root.cursor_directory(route).mkdir(parents=True, exist_ok=True)
    root.cursor(route, group).write_bytes(encode_cursor(CursorLines(sequence, log_id, 1, group, "2026-11-21")))


def tell(built: Built, name: str, *lines: Mapping[str, object]) -> None:
    """Lines of a ledger, as its owner writes them."""
    if name == "segments":
        built.ledger.close()
    write_entries(built.root.ledger / f"{name}.jsonl", *map(dict, lines))


@pytest.mark.parametrize(("route", "group"), [("a", "processed"), ("other", "audit"), ("retired", "processed")])
def test_the_floor_is_above_the_cursors_of_every_route_and_group(ten_records: Built, route: str, group: str) -> None:
    put(ten_records.root, route, group, 45, ten_records.log_id)
    if route == "retired":
        retire_route(ten_records.root, ten_records.disk, route, now="")
    following = ten_records.restart()

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
    ten_records: Built, sequence: int, ours: bool | None, believed: bool
) -> None:
    put(ten_records.root, "a", "g", sequence, {True: ten_records.log_id, False: None, None: bytes(16)}[ours])
    following = ten_records.restart()

    assert following.lines("a", [b"new"]) == (sequence + 1 if believed else LAST + 1)
    if ours is not None and not believed:
        assert any("to be believed" in words for words in following.report.warnings)
    cursors = read_cursors(ten_records.root, "a", log_id=ten_records.log_id, head_sequence=following.last)
    assert [cursor.state is CursorState.VALID for cursor in cursors] == [believed]


def read_by_workers(ten_records: Built, *lines: JournalLine, group: str = "g") -> None:
    """The journal of a work group as it came out of a backup, with its cursor."""
    put(ten_records.root, "a", group, 1, ten_records.log_id)
    data = b"".join(encode_work(line, 0) for line in lines)
    ten_records.root.cursor("a", group).with_suffix(".work").write_bytes(data + b"\n" * 100)


def test_the_floor_is_above_what_workers_have_read(ten_records: Built) -> None:
    """Some of them may be done: a new record with such a sequence would never be delivered."""
    begin = JournalStart(ten_records.log_id, "a", "g", 1, 21)
    read_by_workers(ten_records, begin)
    assert ten_records.restart().lines("a", [b"new"]) == 21

    read_by_workers(ten_records, begin, Commit(read=[(21, 25), (31, 45)]), Commit(done=[(31, 31)]))
    assert Built(ten_records.root.path, epoch=3).lines("a", [b"new"]) == 46


@pytest.mark.parametrize("tail", ["pages", "settled", "one long line"])
def test_a_start_reads_only_the_end_of_a_long_journal(ten_records: Built, tail: str) -> None:
    """Up to the last line about records that were read, or to the snapshot that is in front of all such lines."""
    begin = JournalStart(ten_records.log_id, "a", "g", 1, 21)
    pages = [JournalPage(number * PAGE_RECORDS, bytes([1]) * PAGE_RECORDS) for number in range(8_000)]
    taken_in, settled = Commit(read=[(21, 45)]), Commit(done=[(31, 31)])
    long = Commit(read=[(46, 46)], reasons=[FailureReason("x" * (150 << 10), 1, [])])
    lines = {"pages": [], "settled": [taken_in, *[settled] * 2_000], "one long line": [taken_in, long]}[tail]
    read_by_workers(ten_records, begin, *pages, *lines)
    following = ten_records.restart()
    at = {"pages": 21, "settled": 46, "one long line": 47}[tail]

    assert following.lines("a", [b"new"]) == at
    length = (ten_records.root.cursor_directory("a") / "g.work").stat().st_size
    assert (
        peak_bytes(lambda: find_floor(ten_records.root, log_id=ten_records.log_id, next_sequence=following.last + 1))
        < length
    )
    assert length > 1 << 20


def test_a_journal_with_thousands_of_damaged_lines_is_not_believed(ten_records: Built) -> None:
    begin = JournalStart(ten_records.log_id, "a", "g", 1, 21)
    read_by_workers(ten_records, begin, Commit(read=[(21, 45)]))
    journal = ten_records.root.cursor("a", "g").with_suffix(".work")
    whole = journal.read_bytes().rstrip(b"\n")

    def effort(lines: int) -> int:
        journal.write_bytes(whole + b"\n" + b'"in": [\n' * lines)
        return steps(lambda: find_floor(ten_records.root, log_id=ten_records.log_id, next_sequence=LAST + 1))

    assert effort(60_000) < 2 * effort(2_000)
    assert find_floor(ten_records.root, log_id=ten_records.log_id, next_sequence=LAST + 1).last == LAST


def test_a_line_of_a_journal_that_is_too_long_is_not_decoded(
    ten_records: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_floor, "_LINE_MAX_BYTES", 1 << 10)
    begin = JournalStart(ten_records.log_id, "a", "g", 1, 21)
    long = Commit(read=[(46, 46)], reasons=[FailureReason("x" * (1 << 10), 1, [])])
    read_by_workers(ten_records, begin, Commit(read=[(21, 45)]), long)
    assert find_floor(ten_records.root, log_id=ten_records.log_id, next_sequence=LAST + 1).last == 45


@pytest.mark.parametrize("name", ["segments", "reclaim", "archive"])
def test_a_damaged_line_says_nothing(ten_records: Built, name: str) -> None:
    """One flipped bit, and records that never were are lost for ever; the next lower number still counts."""
    event = {"segments": "sealed", "reclaim": "reclaimed", "archive": "archived"}[name]
    for last in (12, 13):
        tell(ten_records, name, {"event": event, "base": 11, "last": last, "at": 1})
    path = ten_records.root.ledger / f"{name}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"last":13', b'"last":93'))
    following = ten_records.restart()

    assert following.lines("a", [b"new"]) == 13


def test_damaged_lines_do_not_have_the_ledger_read_once_more_each(ten_records: Built) -> None:
    sealed = ({"event": "sealed", "base": last, "last": last} for last in range(100_000, 102_000))
    tell(ten_records, "segments", *sealed)
    path = ten_records.root.ledger / "segments.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)

    def effort(damaged: int) -> int:
        whole = len(lines) - damaged
        spoiled = [line.replace(b'"crc":"', b'"crc":"z') for line in lines[whole:]]
        path.write_bytes(b"".join([*lines[:whole], *spoiled]))
        found = 0

        def find() -> None:
            nonlocal found
            found = last_sealed(ten_records.root, next_sequence=1)

        counted = steps(find)
        assert found == 101_999 - damaged
        return counted

    assert effort(200) < 3 * effort(1)


def test_what_was_sealed_and_is_not_there_is_damage_and_its_numbers_are_not_given_out_again(ten_records: Built) -> None:
    tell(ten_records, "segments", {"event": "sealed", "base": 11, "last": 45, "bytes": 1})
    following = ten_records.restart()

    assert following.lines("a", [b"new"]) == 46
    assert any("acknowledged records 11 to 45 are missing" in words for words in following.report.errors)


def test_after_a_restored_backup_every_new_record_is_delivered(tmp_path: Path) -> None:
    """The segments are older than the cursor: new records get higher sequences, and no command reports damage."""
    root = tmp_path / "root"
    ten_records = Built(root)
    ten_records.lines("a", [b"old"] * LAST)
    ten_records.crash()
    put(ten_records.root, "a", "processed", 45, ten_records.log_id)
    put(ten_records.root, "a", "slow", 3, ten_records.log_id)
    with Daemon(root) as daemon:
        assert "11 to 45 are skipped" in daemon.log
        output_of("append", "a", "--root", root, stdin=b"new\n" * 5)
        eventually(lambda: daemon.ask("HEAD").startswith("OK seq=00000000000000000050 "))
        fresh = [record.sequence for record in ten_records.log.records("a", start="cursor")]
        slow = [record.sequence for record in ten_records.log.records("a", start="cursor", group="slow")]
        daemon.kill()
        daemon.start_again()
        assert daemon.stop() == 0

    assert fresh == [46, 47, 48, 49, 50]
    assert slow == [4, 5, 6, 7, 8, 9, 10, 46, 47, 48, 49, 50]
    assert errors(root) == []
    found = ten_records.log.where(20)
    assert found.state is State.SKIPPED
    assert "skipped sequences 11 to 45" in found.message
    assert ten_records.log.where(46).durable


END = b"\x1e"


@pytest.fixture
def portioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
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
def test_it_finds_what_a_look_at_every_record_finds(portioned: Built, jobs: int) -> None:
    for pattern in (b"error", b"^$", b"er+or", b"\\d|n$", b"", b"one error in three pieces"):
        found = searched(portioned, pattern, jobs=jobs)

        assert lines_of(found, "a") == expected(portioned, pattern, "a")
        assert lines_of(found, "b") == expected(portioned, pattern, "b")
        assert lines_of(found)
        assert all(isinstance(event, Match) for event in found)
    for first, last in ((2, 5), (6, 6), (7, 11), (12, 99)):
        found = searched(portioned, b"", jobs=jobs, route="a", start=first, stop=last)
        assert lines_of(found) == expected(portioned, b"", "a", first, last)


@pytest.mark.parametrize("jobs", [1, 2])
def test_damage_is_reported_where_it_is_and_the_rest_is_found(portioned: Built, jobs: int) -> None:
    whole = expected(portioned, b"error|Error", "b") + expected(portioned, b"error|Error", "a")
    path = portioned.path(1, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[len(data) // 10] ^= 1
    path.write_bytes(data)

    events = searched(portioned, b"error|Error", jobs=jobs)
    damage = [event for event in events if isinstance(event, Damaged)]

    assert damage[0].message.startswith(str(path))
    assert damage[0].hint
    assert isinstance(events[-1], Match)
    assert lines_of(events) == [line for line in whole if int(line.split()[0]) > 7]


def test_a_process_that_is_killed_ends_the_search_with_an_error(portioned: Built) -> None:
    parent = os.getpid()

    def show(_: Batch) -> Match:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return Match(0, b"")

    selection = select(portioned.view, None, "earliest", None, "processed")
    with pytest.raises(OSError, match="a search process was killed"):
        list(search(portioned.view, selection, show, cannot_match=lambda _: False, jobs=2))


def test_what_is_dropped_or_lost_is_reported_whatever_is_looked_for(portioned: Built) -> None:
    portioned.cut()
    first = portioned.lines("a", [b"dropped"])
    portioned.lines("b", [b"kept"], cut=True)
    portioned.piece("lost", b"nobody goes on with", begins=True, ends=False)
    portioned.cut()
    portioned.append("lost", b"another one\n", 1)
    portioned.cut(seal=True)
    shrink(portioned, first, a=first)

    events = [searched(portioned, each, jobs=1) for each in (b"", b"nobody", b"[?]")]
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


LAST_RECORDS = (1 << 64) - 1


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
        ("a", LAST_RECORDS, None),
        ("a", "middle", b"7"),
        ("b", LAST_RECORDS, b"7"),
        ("b", 3, None),
        ("rare", LAST_RECORDS, None),
        (None, LAST_RECORDS, b"7"),
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
