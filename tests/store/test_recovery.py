"""Recovery: write, damage, recover, look at the report, read, write on, read again.

Damage is an argument: a function from the bytes of the newest segment to what a crash or a bad disk made of them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import pytest
from contents import assert_sound, errors, values
from damage import flipped
from faults import Died, DyingDisk, until_it_survives
from logs import START_NS, Built, Unsynced

import wald
from wald.errors import Damaged, UnsupportedFormat
from wald.format.batch import HEADER
from wald.format.head import decode_head
from wald.format.names import Kind
from wald.format.segment import SegmentHeader, encode_header
from wald.store.directory import Root, list_segments
from wald.store.disk import Disk
from wald.store.ledger import Ledger
from wald.store.raw import FIRST_BATCH, RawFile, Scanned
from wald.store.recovery import REPORTS_KEPT, Content, Fate, Header, Recovered, recover, verdict
from wald.store.routes import add_route
from wald.store.sealer import seal
from wald.store.writer import Draft, Route

SEGMENT_BYTES = 4096
NOISE = bytes(range(1, 251)) * 2

# The table.

FACTS = list(itertools.product(Header, Content, [False, True]))


@pytest.mark.parametrize(("header", "content", "torn"), FACTS)
def test_every_combination_of_facts_has_a_verdict(header: Header, content: Content, torn: bool) -> None:
    decided = verdict(header=header, content=content, torn=torn)
    not_ours = header in (Header.FOREIGN, Header.NEWER)

    assert (decided.fate is Fate.REFUSE) == not_ours
    assert (decided.fate is Fate.QUARANTINE) == (not not_ours and content is Content.NOTHING)
    assert (decided.fate is Fate.CUT) == (not not_ours and content is Content.RECORDS)
    assert decided.fate is not Fate.CARRY or content is Content.PIECES
    assert decided.fate is not Fate.REPLACE or content is Content.CONTROL
    # Nothing is cut out of a file that is refused, or moved away as a whole.
    assert decided.trim == (torn and decided.fate not in (Fate.REFUSE, Fate.QUARANTINE))


# The log that is damaged: records 1 and 2 in a cut segment, 3 to 6 in the active one, in batches of 2, 1 and 1.

BASE = 3
ALL = [b"%d" % number for number in range(1, 7)]


def story(path: Path, *, last_is_durable: bool = True, sealed: bool = False) -> Built:
    built = Built(path, segment_max_bytes=SEGMENT_BYTES)
    built.lines("web", ALL[:2])
    built.cut()
    if sealed:
        built.seal()
    built.lines("web", ALL[2:4])
    built.lines("web", ALL[4:5])
    built.lines("web", ALL[5:], publish=last_is_durable)
    built.crash()
    return built


def newest(path: Path) -> Path:
    return list_segments(Root(path)).segments[-1].path


def offsets(path: Path) -> list[int]:
    """Where each batch of the newest segment begins, and where the last one ends."""
    with newest(path).open("rb") as file:
        found = [batch for batch in RawFile(file.fileno()).scan() if isinstance(batch, Scanned)]
    return [batch.offset for batch in found] + [found[-1].end]


def readable(path: Path, route: str | None = None) -> list[bytes]:
    """Every record that can be read, damage or not."""
    told: list[Damaged] = []
    return [record.value for record in wald.open(path).read(route, on_damage=told.append)]


def tree(path: Path) -> dict[str, bytes]:
    """Every file of a log and what is in it, except the reports, whose times differ."""
    files = (file for file in path.rglob("*") if file.is_file() and file.parent.name != "recovery")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def quarantined(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path / "quarantine").iterdir())]


def start_again(path: Path, *, epoch: int = 2) -> Built:
    return Built(path, segment_max_bytes=SEGMENT_BYTES, epoch=epoch)


def goes_on(built: Built, kept: list[bytes], next_sequence: int) -> None:
    """New records come behind the old ones, now and after another start."""
    path, epoch = built.root.path, built.writer.epoch
    assert readable(path) == kept
    assert built.lines("web", [b"new"]) == next_sequence
    assert readable(path) == [*kept, b"new"]
    built.crash()
    built = start_again(path, epoch=epoch + 1)
    assert built.report.errors == []
    assert built.lines("web", [b"newer"]) == next_sequence + 1
    assert readable(path) == [*kept, b"new", b"newer"]
    built.crash()


class TestUnfinishedWrites:
    """What a crash can do to the last batch: it was not acknowledged, so cutting it is no error."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        """As the crash left it; each damage is done to a copy."""
        path = tmp_path / "left"
        story(path, last_is_durable=False)
        return path

    def check(self, log: Path, path: Path, data: bytes) -> None:
        shutil.copytree(log, path)
        start = offsets(path)[-2]
        newest(path).write_bytes(data)
        torn = data[start:].rstrip(b"\0")
        built = start_again(path)
        report = built.report
        assert report.errors == []
        assert report.fate == "cut"
        assert report.trimmed_bytes == len(torn)
        assert quarantined(path) == ([torn] if torn else [])
        if torn:
            (line,) = report.info
            assert f"/segments/{BASE:020d}.wal: offset {start}: {len(torn)} bytes" in line
            assert (path / report.kept_in).read_bytes() == torn
        else:
            assert report.info == []
        assert built.path(BASE, Kind.RAW).stat().st_size == start
        goes_on(built, ALL[:5], 6)
        assert errors(path) == []
        shutil.rmtree(path)

    @pytest.mark.parametrize("padding", [False, True], ids=["the file ends there", "zeros follow"])
    def test_cut_short_at_any_byte(self, log: Path, tmp_path: Path, padding: bool) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        last = len(data[:end].rstrip(b"\0"))  # what is behind it is padding, and zeros all the same
        for length in range(start, last):
            whole = data[:length].ljust(SEGMENT_BYTES, b"\0") if padding else data[:length]
            self.check(log, tmp_path / "log", whole)

    def test_a_bit_flipped_anywhere(self, log: Path, tmp_path: Path) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for position in range(start, end):
            self.check(log, tmp_path / "log", flipped(data, 8 * position + position % 8))

    def test_only_its_end_is_there(self, log: Path, tmp_path: Path) -> None:
        """Pages reach the disk in any order."""
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for length in (1, 8, HEADER.size, end - start - 4):
            self.check(log, tmp_path / "log", data[:start] + bytes(length) + data[start + length :])

    def test_garbage_instead(self, log: Path, tmp_path: Path) -> None:
        data, start = newest(log).read_bytes(), offsets(log)[-2]
        for noise in (NOISE, b"x", b"\0\0x", b"WBAT", b"WBAT" * 40):
            self.check(log, tmp_path / "log", data[:start] + noise)

    def test_whole_and_not_published(self, log: Path, tmp_path: Path) -> None:
        """Nobody was told of it, and it may stay."""
        shutil.copytree(log, tmp_path / "log")
        built = start_again(tmp_path / "log")
        assert (built.report.info, built.report.errors) == ([], [])
        goes_on(built, ALL, 7)
        assert_sound(tmp_path / "log")


DURABLE_DAMAGE: dict[str, tuple[Callable[[bytes, list[int]], bytes], int, list[bytes]]] = {
    # damage → (bytes and offsets of control, batches, end → bytes; which batch the report names; what is left)
    "a bit of the first batch's body": (lambda d, o: flipped(d, 8 * (o[1] + 70)), 1, [*ALL[:2], *ALL[4:]]),
    "a bit of the middle batch's body": (lambda d, o: flipped(d, 8 * (o[2] + 70)), 2, [*ALL[:4], ALL[5]]),
    "a bit of the middle batch's header": (lambda d, o: flipped(d, 8 * (o[2] + 12)), 2, [*ALL[:4], ALL[5]]),
    "the middle batch is zeros": (lambda d, o: d[: o[2]] + bytes(o[3] - o[2]) + d[o[3] :], 2, [*ALL[:4], ALL[5]]),
    "two batches are noise": (lambda d, o: d[: o[1]] + (NOISE * 9)[: o[3] - o[1]] + d[o[3] :], 1, [*ALL[:2], ALL[5]]),
    "a bit of the last batch": (lambda d, o: flipped(d, 8 * (o[3] + 70)), 3, ALL[:5]),
    "the last batch is cut short": (lambda d, o: d[: o[3] + 70], 3, ALL[:5]),
    "the last batch is zeros": (lambda d, o: d[: o[3]].ljust(SEGMENT_BYTES, b"\0"), 3, ALL[:5]),
    "the last two batches are gone": (lambda d, o: d[: o[2]], 2, ALL[:4]),
    "a bit of the control batch": (lambda d, o: flipped(d, 8 * (o[0] + 70)), 0, ALL),
    "the control batch is zeros": (lambda d, o: d[: o[0]] + bytes(o[1] - o[0]) + d[o[1] :], 0, ALL),
}


@pytest.mark.parametrize("name", DURABLE_DAMAGE)
def test_damage_to_what_was_durable_is_an_error_with_its_place(tmp_path: Path, name: str) -> None:
    """What is around it stays readable, and the sequences of what is lost are not given out again."""
    damage, named, kept = DURABLE_DAMAGE[name]
    path = tmp_path / "log"
    story(path)
    places, data = offsets(path), newest(path).read_bytes()
    damaged = damage(data, places)
    newest(path).write_bytes(damaged)
    built = start_again(path)
    assert built.report.errors
    assert f"/segments/{BASE:020d}.wal: offset {places[named]}: " in built.report.errors[0]
    assert built.report.fate == "cut"
    torn = damaged[built.report.scanned_bytes :].rstrip(b"\0")
    assert quarantined(path) == ([torn] if torn else [])
    goes_on(built, kept, 7)


NOTHING_LEFT: dict[str, Callable[[bytes, list[int]], bytes]] = {
    "empty": lambda data, places: b"",
    "shorter than the header": lambda data, places: data[:40],
    "the header alone": lambda data, places: data[:FIRST_BATCH],
    "zeros": lambda data, places: bytes(len(data)),
    "noise": lambda data, places: NOISE,
    "noise behind the header": lambda data, places: data[:FIRST_BATCH] + NOISE,
}


@pytest.mark.parametrize("sealed", [False, True], ids=["after a raw segment", "after a sealed one"])
@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_segment_of_which_nothing_can_be_read_is_kept_aside(tmp_path: Path, name: str, sealed: bool) -> None:
    path = tmp_path / "log"
    state = story(path, sealed=sealed).writer.state
    damaged = NOTHING_LEFT[name](newest(path).read_bytes(), offsets(path))
    newest(path).write_bytes(damaged)
    built = start_again(path)
    assert built.report.fate == "quarantine"
    assert any("nothing in it can be read" in line for line in built.report.errors)
    assert any("records 3 to 6 were acknowledged" in line for line in built.report.errors)
    assert quarantined(path) == [damaged]
    assert (path / built.report.kept_in).read_bytes() == damaged
    assert built.writer.state.next_sequence == state.next_sequence
    goes_on(built, ALL[:2], 7)


def test_a_damaged_header_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log"
    story(path)
    newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * 20))
    built = start_again(path)
    assert built.report.fate == "cut"
    assert any(f"{BASE:020d}.wal: offset 0: " in line for line in built.report.errors)
    assert quarantined(path) == []
    assert built.last == 6
    assert built.lines("web", [b"new"]) == 7


@pytest.mark.parametrize("damage", ["header", "tail"])
def test_a_segment_without_records_is_replaced_and_keeps_its_state(tmp_path: Path, damage: str) -> None:
    """Also where the segments before it are gone, so that only its control batch knows."""
    path = tmp_path / "log"
    built = Built(path)
    commit(built, [draft(b"1\n", producer=(7, 1))])
    built.piece("long", b"begin", begins=True, ends=False)
    built.cut()
    state = built.writer.state
    built.crash()
    built.path(1, Kind.RAW).unlink()
    data, end = newest(path).read_bytes(), built.writer.position
    newest(path).write_bytes(flipped(data, 8 * 20) if damage == "header" else data[:end] + NOISE)
    built = Built(path, epoch=2)
    assert built.report.fate == "replace"
    assert bool(built.report.errors) == (damage == "header")
    assert quarantined(path) == ([NOISE] if damage == "tail" else [])
    assert built.writer.state == state
    assert [segment.base_sequence for segment in list_segments(built.root).segments] == [3]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"log_id": bytes(16)}, Damaged, "another log"),
        ({"version": 2}, UnsupportedFormat, "version 2"),
    ],
    ids=["of another log", "of a newer wald"],
)
@pytest.mark.parametrize("torn", [b"", NOISE], ids=["whole", "torn"])
def test_what_is_not_ours_is_not_touched(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str, torn: bytes
) -> None:
    path = tmp_path / "log"
    built = story(path)
    told: dict[str, Any] = {
        "log_id": built.log_id,
        "base_sequence": BASE,
        "epoch": 1,
        "created_at_ns": START_NS,
        "salt": 7,
    }
    data = newest(path).read_bytes()[: offsets(path)[-1]]
    newest(path).write_bytes(encode_header(SegmentHeader(**told | changes)) + data[FIRST_BATCH:] + torn)
    before = tree(path)
    with pytest.raises(error, match=f"{newest(path)}: offset 0: .*{words}"):
        start_again(path)
    assert tree(path) == before


class TestTornTurns:
    """Several batches in one write, of which the disk has some: cut as a whole if that can be what happened."""

    def build(self, path: Path, *turns: list[bytes], publish: int = 0) -> tuple[Built, list[int]]:
        """A commit for each of ``turns``, a batch for each of its lines; the head moves with the first ``publish``."""
        built = Built(path, segment_max_bytes=SEGMENT_BYTES)
        built.lines("web", [b"1"])
        for number, lines in enumerate(turns):
            built.now_ns += 1
            drafts = [draft(line + b"\n", route=Route.named(f"r{at}")) for at, line in enumerate(lines)]
            commit(built, drafts, publish=number < publish)
        built.crash()
        return built, offsets(path)

    def spoil(self, path: Path, places: list[int], batch: int) -> bytes:
        """Make a batch zeros; returns everything from it on."""
        data = newest(path).read_bytes()
        data = data[: places[batch]] + bytes(places[batch + 1] - places[batch]) + data[places[batch + 1] :]
        newest(path).write_bytes(data)
        return data[places[batch] : places[-1]]

    @pytest.mark.parametrize("missing", [2, 3, 4])
    def test_what_is_behind_its_hole_goes_too(self, tmp_path: Path, missing: int) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3", b"4", b"5"])
        rest = self.spoil(path, places, missing)
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert built.report.trimmed_bytes == len(rest)
        assert quarantined(path) == [rest]
        (line,) = built.report.info
        assert f"offset {places[missing]}: " in line
        goes_on(built, [b"%d" % number for number in range(1, missing)], missing)

    @pytest.mark.parametrize("head", ["missing", "zeros"])
    def test_no_head_is_needed_to_tell(self, tmp_path: Path, head: str) -> None:
        """A power cut may take it, or leave its pages empty."""
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4", b"5"])
        rest = self.spoil(path, places, 4)
        if head == "missing":
            built.root.head.unlink()
        else:
            built.root.head.write_bytes(bytes(160))
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"2", b"3"], 4)

    def test_without_a_head_a_hole_in_a_turn_that_was_synced_is_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4"])
        self.spoil(path, places, 2)
        built.root.head.unlink()
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"3", b"4"], 5)

    def test_two_turns_behind_the_hole_mean_that_it_was_synced(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3"], [b"4"])
        self.spoil(path, places, 2)
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"3", b"4"], 5)

    def test_a_hole_below_the_head_is_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3", b"4"], publish=1)
        self.spoil(path, places, 3)
        built = Built(path, epoch=2)
        assert [f"offset {places[3]}: " in line for line in built.report.errors] == [True]
        goes_on(built, [b"1", b"2", b"4"], 5)

    def test_a_hole_below_the_head_and_a_torn_turn_above_it(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3"], [b"4", b"5"], publish=1)
        self.spoil(path, places, 2)
        rest = self.spoil(path, places, 4)
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"3"], 4)

    def test_a_control_batch_is_never_in_a_turn(self, tmp_path: Path) -> None:
        """It was durable before its segment had a name, however old the head that a power cut left."""
        path = tmp_path / "log"
        built = Built(path)
        built.lines("web", [b"1"])
        old = built.root.head.read_bytes()
        built.cut()
        built.lines("web", [b"2"])
        built.crash()
        built.root.head.write_bytes(old)
        self.spoil(path, offsets(path), 0)
        built = Built(path, epoch=2)
        assert [f"offset {FIRST_BATCH}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"2"], 3)


def draft(payload: bytes, *, producer: tuple[int, int] = (0, 0), route: Route | None = None) -> Draft:
    """A batch of lines."""
    return Draft(
        route or Route.named("web"),
        [payload],
        len(payload),
        payload.count(b"\n"),
        producer_id=producer[0],
        producer_sequence=producer[1],
    )


def commit(built: Built, drafts: list[Draft], *, publish: bool = True) -> None:
    built.writer.commit(built.writer.place(drafts, now_ns=built.now_ns))
    if publish:
        built.publish()


class TestLongRecords:
    """A record in pieces, and starts in the middle of it."""

    @pytest.mark.parametrize("torn", [b"", NOISE], ids=["whole", "torn"])
    @pytest.mark.parametrize("starts", [1, 2, 5])
    def test_a_segment_that_holds_only_pieces_is_taken_over(self, tmp_path: Path, starts: int, torn: bytes) -> None:
        """Its name is that of the record that comes next, and that has not come yet."""
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.cut()
        expected = b"begin"
        for epoch in range(2, 2 + starts):
            built.piece("long", b" and on", begins=False, ends=False)
            expected += b" and on"
            with newest(path).open("r+b") as file:
                file.seek(built.writer.position)
                file.write(torn)
            built.crash()
            built = Built(path, epoch=epoch)
            assert built.report.fate == "carry"
            assert built.report.errors == []
            assert [segment.base_sequence for segment in list_segments(built.root).segments] == [1, 2]
        assert len(quarantined(path)) == (starts if torn else 0)
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("web", [b"after"])
        assert built.writer.base_sequence == 2
        assert values(path, "long") == [expected + b" end"]
        assert values(path, "web") == [b"after"]
        assert_sound(path)

    @pytest.mark.parametrize("kind", ["pieces", "control"])
    def test_a_segment_whose_records_are_gone_stays_where_it_is(self, tmp_path: Path, kind: str) -> None:
        """The sequences that are not there keep its name from being needed, and its pieces must not come twice."""
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.cut()
        if kind == "pieces":
            built.piece("long", b" and on", begins=False, ends=False)
        end = built.writer.position
        built.lines("web", [b"2", b"3"])
        built.crash()
        os.truncate(newest(path), end)
        built = Built(path, epoch=2)
        assert built.report.fate == "cut"
        assert any("records 2 to 3 were acknowledged" in line for line in built.report.errors)
        assert [segment.base_sequence for segment in list_segments(built.root).segments] == [1, 2, 4]
        assert sum(file.read_bytes().count(b" and on") for file in built.root.segments.iterdir()) == (kind == "pieces")
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("web", [b"4"])
        built.lines("long", [b"whole"])
        for _ in range(2):
            # What is missing may have been a piece of the record, so that is not given out as if it were whole.
            assert readable(path, "long") == [b"whole"]
            assert readable(path, "web") == [b"4"]
            built.cut()
            built.seal()
            built.lines("other", [b"6"])


class TestState:
    """Producers, open records and routes outlive their segments."""

    def build(self, path: Path, *, sealed: bool = False) -> Built:
        built = Built(path)
        for number in range(1, 4):
            commit(built, [draft(b"a\nb\n", producer=(7, number)), draft(b"c\n", producer=(8, 10 * number))])
        built.lines("other", [b"d"])
        built.piece("long", b"begin", begins=True, ends=False)
        built.piece("done", b"begin", begins=True, ends=False)
        built.cut()
        if sealed:
            built.seal()
        built.piece("done", b"end\n", begins=False, ends=True)
        commit(built, [draft(b"e\n", producer=(7, 4))])
        return built

    def expect(self, built: Built) -> None:
        state = built.writer.state
        assert state.open_records == {"long": 11}
        assert state.routes == {"web": 13, "other": 10, "long": 11, "done": 12}
        assert list(state.producers.table) == [8, 7]
        assert state.producers.expected(7) == 5
        written = state.producers.find(7, 2)
        assert written is not None
        assert (written.first, written.last) == (4, 5)

    @pytest.mark.parametrize("end", ["crash", "close"])
    def test_it_is_the_same_after_starts_and_cuts(self, tmp_path: Path, end: str) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        for epoch in range(2, 5):
            state = built.writer.state
            built.crash() if end == "crash" else built.writer.close()
            built = Built(path, epoch=epoch)
            assert built.writer.state == state
            built.lines("other", [b"more"])
            built.cut()
            built.lines("other", [b"more"])
        assert built.writer.state.open_records == {"long": 11}
        assert built.writer.state.producers.expected(7) == 5

    @pytest.mark.parametrize("sealed", [False, True], ids=["raw", "sealed"])
    def test_without_a_control_batch_it_comes_from_the_segment_before(self, tmp_path: Path, sealed: bool) -> None:
        path = tmp_path / "log"
        built = self.build(path, sealed=sealed)
        state = built.writer.state
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert len(built.report.errors) == 1
        assert built.writer.state == state

    @pytest.mark.parametrize("sealed", [False, True], ids=["raw", "sealed"])
    def test_an_empty_segment_without_a_control_batch_loses_no_state(self, tmp_path: Path, sealed: bool) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        built.cut()
        if sealed:
            built.seal()
        state = built.writer.state
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert built.report.fate == "quarantine"
        assert built.writer.state == state

    def test_a_route_is_known_before_it_has_records(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log")
        add_route(built.root, built.disk, "new")
        built.crash()
        assert Built(tmp_path / "log", epoch=2).writer.state.routes == {"new": 0}


class TestHead:
    """The head is a hint about what must be there; it may be lost."""

    @pytest.mark.parametrize("head", [None, b"", b"nonsense\n", bytes(160)], ids=["missing", "empty", "torn", "zeros"])
    def test_without_one_everything_that_is_there_counts(self, tmp_path: Path, head: bytes | None) -> None:
        path = tmp_path / "log"
        built = story(path)
        if head is None:
            built.root.head.unlink()
        else:
            built.root.head.write_bytes(head)
        built = start_again(path)
        assert (built.report.info, built.report.errors) == ([], [])
        goes_on(built, ALL, 7)
        assert_sound(path)

    def test_one_that_is_behind_hides_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = Built(path)
        built.lines("web", ALL[:1])
        old = built.root.head.read_bytes()
        built.lines("web", ALL[1:3])
        built.cut()
        built.lines("web", ALL[3:])
        built.crash()
        built.root.head.write_bytes(old)
        built = start_again(path)
        assert (built.report.info, built.report.errors) == ([], [])
        goes_on(built, ALL, 7)
        assert_sound(path)

    def test_one_that_is_ahead_is_believed(self, tmp_path: Path) -> None:
        """Somebody may hold an acknowledgement of what is not there any more."""
        path = tmp_path / "log"
        built = story(path)
        position = offsets(path)[-2]
        os.truncate(newest(path), position)
        built = start_again(path)
        assert [line for line in built.report.errors if "records 6 to 6 were acknowledged" in line]
        assert [line for line in built.report.errors if f"offset {position}: " in line and "were durable" in line]
        head = decode_head(built.root.head.read_bytes())
        assert head is not None
        assert head.sequence == 6
        goes_on(built, ALL[:5], 7)

    def test_a_log_whose_newest_segment_is_gone_does_not_begin_again(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        story(path)
        newest(path).unlink()
        built = start_again(path)
        assert any("records 3 to 6 were acknowledged" in line for line in built.report.errors)
        goes_on(built, ALL[:2], 7)


class TestSealedLogs:
    """A log whose segments are all sealed: nothing is unfinished."""

    def build(self, path: Path) -> Built:
        built = story(path)
        os.truncate(newest(path), offsets(path)[-1])
        ledger = Ledger(built.root.ledger / "segments.jsonl", built.disk)
        for segment in list_segments(built.root).segments:
            seal(built.root, segment, built.disk, ledger, now=lambda: START_NS)
        ledger.close()
        assert [segment.kind for segment in list_segments(built.root).segments] == [Kind.SEALED] * 2
        return built

    @pytest.mark.parametrize("head", [True, False], ids=["with a head", "without"])
    def test_it_goes_on(self, tmp_path: Path, head: bool) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        state = built.writer.state
        if not head:
            built.root.head.unlink()
        built = start_again(path)
        assert (built.report.info, built.report.errors) == ([], [])
        assert built.writer.state == state
        goes_on(built, ALL, 7)
        assert_sound(path)

    def test_one_that_cannot_be_read_keeps_its_sequences(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        sealed = built.path(BASE, Kind.SEALED)
        sealed.write_bytes(NOISE)
        built = start_again(path)
        assert any(str(sealed) in line for line in built.report.errors)
        goes_on(built, ALL[:2], 7)

    def test_neither_head_nor_sealed_file_nor_ledger_readable_still_hides_nothing_new(self, tmp_path: Path) -> None:
        """A new segment of the same name as the sealed one would not be seen."""
        path = tmp_path / "log"
        built = self.build(path)
        built.path(BASE, Kind.SEALED).write_bytes(NOISE)
        (built.root.ledger / "segments.jsonl").unlink()
        built.root.head.unlink()
        built = start_again(path)
        assert built.writer.base_sequence == BASE + 1
        goes_on(built, ALL[:2], BASE + 1)

    def test_one_without_its_index_hands_on_all_that_its_frames_hold(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        state = built.writer.state
        sealed = built.path(BASE, Kind.SEALED)
        sealed.write_bytes(sealed.read_bytes()[:-10])
        built = start_again(path)
        assert any(str(sealed) in line for line in built.report.errors)
        assert built.writer.state == state
        goes_on(built, ALL, 7)

    def test_a_damaged_frame_costs_no_sequence(self, tmp_path: Path) -> None:
        """How far a sealed segment goes is in its index."""
        path = tmp_path / "log"
        built = self.build(path)
        sealed = built.path(BASE, Kind.SEALED)
        sealed.write_bytes(flipped(sealed.read_bytes(), 8 * 60))
        built.root.head.unlink()
        built = start_again(path)
        assert len(built.report.errors) == 1
        assert built.writer.base_sequence == 7


def pieces(path: Path) -> None:
    built = Built(path)
    built.piece("long", b"begin", begins=True, ends=False)
    built.cut()
    built.piece("long", b" and on", begins=False, ends=False)
    built.crash()


def damaged(path: Path, damage: Callable[[bytes], bytes]) -> None:
    story(path, last_is_durable=False)
    newest(path).write_bytes(damage(newest(path).read_bytes()))


LEFT_BEHIND: dict[str, Callable[[Path], object]] = {
    "a whole segment": story,
    "an unfinished write": lambda path: damaged(path, lambda data: data.rstrip(b"\0")[:-1]),
    "damage and an unfinished write": lambda path: damaged(
        path, lambda data: flipped(data.rstrip(b"\0")[:-1], 8 * 270)
    ),
    "a damaged header": lambda path: damaged(path, lambda data: flipped(data, 8 * 20)),
    "nothing that can be read": lambda path: damaged(path, lambda data: NOISE),
    "pieces": pieces,
}


@pytest.mark.parametrize("part", [0.0, 0.6], ids=["nothing of it", "a part of it"])
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_a_recovery_that_is_interrupted_at_any_step_is_made_again(tmp_path: Path, name: str, part: float) -> None:
    left = tmp_path / "left"
    LEFT_BEHIND[name](left)

    def recovered(path: Path, disk: Disk) -> Recovered:
        return recover(Root(path), disk, log_id=wald.open(path).identity.log_id, epoch=2, now_ns=START_NS)

    shutil.copytree(left, tmp_path / "reference")
    reference = recovered(tmp_path / "reference", Unsynced())
    for disk in until_it_survives(lambda last: DyingDisk(last, part=part)):
        assert isinstance(disk, DyingDisk)
        path = tmp_path / "log"
        shutil.copytree(left, path)
        try:
            recovered(path, disk)
            survived = True
        except Died:
            survived = False
        disk.abandon()
        again = recovered(path, Unsynced())
        assert again.state == reference.state
        assert (again.carry is None) == (reference.carry is None)
        assert tree(path) == tree(tmp_path / "reference")
        shutil.rmtree(path)
        if survived:
            break


def test_the_same_damage_in_the_next_life_does_not_replace_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kept = []
    for epoch, noise in enumerate([NOISE, NOISE[::-1], NOISE[:99]], start=1):
        built = Built(path, epoch=epoch)
        built.crash()
        with newest(path).open("r+b") as file:
            file.seek(built.writer.position)
            file.write(noise)
        kept.append(noise)
    Built(path, epoch=9).crash()
    assert sorted(quarantined(path)) == sorted(kept)
    for epoch, noise in enumerate([NOISE, NOISE[:99]], start=10):
        newest(path).write_bytes(noise)
        kept.append(noise)
        Built(path, epoch=epoch).crash()
    assert sorted(quarantined(path)) == sorted(kept)


class TestReports:
    """One file for each start."""

    def test_it_tells_what_was_found_and_done(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        story(path, last_is_durable=False)
        start = offsets(path)[-2]
        os.truncate(newest(path), start + 66)
        built = Built(path, epoch=12)
        told = json.loads((path / "recovery" / "0000000012.json").read_bytes())
        assert told == asdict(built.report)
        assert told["segment"] == f"{BASE:020d}.wal"
        assert (told["scanned_bytes"], told["scanned_batches"], told["trimmed_bytes"]) == (start, 3, 66)
        assert (told["epoch"], told["at_ns"], told["next_sequence"], told["errors"]) == (12, START_NS, 6, [])

    def test_the_newest_are_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        for epoch in range(1, REPORTS_KEPT + 9):
            Built(path, epoch=epoch).crash()
        names = sorted(os.listdir(path / "recovery"))
        assert names == [f"{epoch:010d}.json" for epoch in range(9, REPORTS_KEPT + 9)]


class Opens:
    """Notes the files that are opened while it is entered; an audit hook cannot be taken away again."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._listening = False
        sys.addaudithook(self._hear)

    def __enter__(self) -> Self:
        self._listening = True
        return self

    def __exit__(self, *_: object) -> None:
        self._listening = False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._listening and event == "open":
            self.names.append(str(arguments[0]))


def test_a_start_opens_as_many_files_however_long_the_log_is(tmp_path: Path) -> None:
    counts = []
    for segments in (2, 40):
        path = tmp_path / str(segments)
        built = Built(path)
        for _ in range(segments):
            built.lines("web", [b"line"])
            built.cut()
        built.seal()
        built.lines("web", [b"last"])
        built.crash()
        with Opens() as opens:
            recover(built.root, built.disk, log_id=built.log_id, epoch=2, now_ns=START_NS)
        counts.append(len(opens.names))
        assert opens.names
        assert not any(name.endswith(".zst") for name in opens.names)
    assert counts[0] == counts[1]
