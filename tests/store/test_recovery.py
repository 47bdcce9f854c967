"""Recovery of a log at the start of the daemon, after a crash or damage, and the state that it passes on."""

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
from contents import assert_sound, errors
from crashed import (
    ALL,
    BASE,
    NOISE,
    SEGMENT_BYTES,
    goes_on,
    newest,
    offsets,
    quarantined,
    readable,
    start_again,
    story,
    tree,
)
from damage import flipped
from faults import DyingDisk, until_it_survives
from logs import START_NS, Built, Unsynced, commit, draft
from powercut import RecordingDisk
from shrinking import shrink

import wald
from wald.errors import Damaged, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.format.segment import SegmentHeader, encode_segment_header
from wald.segments.raw_scan import FIRST_BATCH
from wald.writing.recovery import REPORTS_KEPT, Content, Fate, Header, Recovered, decide_fate, recover
from wald.writing.sealing import seal
from wald.writing.writer import Route

# The table.


def test_every_combination_of_facts_has_a_fate() -> None:
    for header, content in itertools.product(Header, Content):
        fate = decide_fate(header, content)
        not_ours = header in (Header.FOREIGN, Header.NEWER)

        assert (fate is Fate.REFUSE) == not_ours
        assert (fate is Fate.QUARANTINE) == (not not_ours and content is Content.NOTHING)
        assert (fate is Fate.CUT) == (not not_ours and content is Content.RECORDS)
        assert fate is not Fate.CARRY or content is Content.PIECES
        assert fate is not Fate.REPLACE or content is Content.CONTROL


DURABLE_DAMAGE: dict[str, tuple[Callable[[bytes, list[int]], bytes], int, list[bytes]]] = {
    # damage → (bytes and offsets of control, batches, end → bytes; index of the reported batch; remaining records)
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
    """Batches around it stay readable, and the lost sequences are not reused."""
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


@pytest.mark.parametrize(("name", "sealed"), [(name, name == "noise") for name in NOTHING_LEFT])
def test_a_segment_of_which_nothing_can_be_read_is_kept_aside(tmp_path: Path, name: str, sealed: bool) -> None:
    path = tmp_path / "log"
    state = story(path, sealed=sealed).writer.state
    damaged = NOTHING_LEFT[name](newest(path).read_bytes(), offsets(path))
    newest(path).write_bytes(damaged)
    built = start_again(path)
    assert built.report.fate == "quarantine"
    assert any("no part of the segment is readable" in line for line in built.report.errors)
    assert any("acknowledged records 3 to 6" in line for line in built.report.errors)
    assert quarantined(path) == [damaged]
    assert (path / built.report.kept_in).read_bytes() == damaged
    assert built.writer.state.next_sequence == state.next_sequence
    goes_on(built, ALL[:2], 7)


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
    ("changes", "error", "words", "torn"),
    [({"log_id": bytes(16)}, Damaged, "another log", b""), ({"version": 3}, UnsupportedFormat, "version 3", NOISE)],
    ids=["of another log", "of a newer wald, torn"],
)
def test_what_is_not_ours_is_not_touched(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str, torn: bytes
) -> None:
    path = tmp_path / "log"
    built = story(path)
    reported: dict[str, Any] = {
        "log_id": built.log_id,
        "base_sequence": BASE,
        "epoch": 1,
        "created_at_ns": START_NS,
        "salt": 7,
    }
    data = newest(path).read_bytes()[: offsets(path)[-1]]
    newest(path).write_bytes(encode_segment_header(SegmentHeader(**reported | changes)) + data[FIRST_BATCH:] + torn)
    before = tree(path)
    with pytest.raises(error, match=f"{newest(path)}: offset 0: .*{words}"):
        start_again(path)
    assert tree(path) == before


def pieces(path: Path) -> None:
    built = Built(path)
    built.piece("long", b"begin", begins=True, ends=False)
    built.cut()
    built.piece("long", b" and on", begins=False, ends=False)
    built.crash()


def damaged(path: Path, damage: Callable[[bytes], bytes]) -> None:
    story(path, last_is_durable=False)
    newest(path).write_bytes(damage(newest(path).read_bytes()))


def alone(path: Path) -> None:
    """The only segment of a log, of which nothing can be read."""
    built = Built(path)
    built.lines("web", [b"1", b"2"])
    built.crash()
    newest(path).write_bytes(NOISE)


LEFT_BEHIND: dict[str, Callable[[Path], object]] = {
    "a whole segment": story,
    "an unfinished write": lambda path: damaged(path, lambda data: data.rstrip(b"\0")[:-1]),
    "damage and an unfinished write": lambda path: damaged(
        path, lambda data: flipped(data.rstrip(b"\0")[:-1], 8 * 270)
    ),
    "a damaged header": lambda path: damaged(path, lambda data: flipped(data, 8 * 20)),
    "nothing that can be read": lambda path: damaged(path, lambda data: NOISE),
    "nothing that can be read, in the only segment": alone,
    "pieces": pieces,
}


@pytest.mark.parametrize(("name", "part"), [(name, 0.6 * (number % 2)) for number, name in enumerate(LEFT_BEHIND)])
def test_a_recovery_that_is_interrupted_at_any_step_is_made_again(tmp_path: Path, name: str, part: float) -> None:
    left = tmp_path / "left"
    LEFT_BEHIND[name](left)

    def recovered(path: Path, disk: Disk) -> Recovered:
        return recover(Root(path), disk, log_id=wald.open(path).identity.log_id, epoch=2, now_ns=START_NS)

    shutil.copytree(left, tmp_path / "reference")
    reference = recovered(tmp_path / "reference", Unsynced())
    for disk in until_it_survives(lambda last: DyingDisk(last, part=part)):
        path = tmp_path / "log"
        shutil.copytree(left, path)
        with disk.attempt():
            recovered(path, disk)
        disk.abandon()
        again = recovered(path, Unsynced())
        assert again.state == reference.state
        assert (again.carry is None) == (reference.carry is None)
        assert tree(path) == tree(tmp_path / "reference")
        shutil.rmtree(path)


def test_what_else_is_in_quarantine_does_not_stand_for_the_only_segment(tmp_path: Path) -> None:
    """It is of an earlier life, a torn end, or from a repair: the segments may be on a disk that is not mounted."""
    path = tmp_path / "log"
    alone(path)
    segment = newest(path)
    for suffix in ("1", "2.torn", "4096.2.torn", "0123456789012345"):
        shutil.copy(segment, path / "quarantine" / f"{segment.name}.{suffix}")
    segment.unlink()
    with pytest.raises(Damaged, match="there is no segment, but records"):
        start_again(path, epoch=3)


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
    for epoch in range(10, REPORTS_KEPT + 12):
        newest(path).write_bytes(NOISE[:epoch])
        kept.append(NOISE[:epoch])
        Built(path, epoch=epoch).crash()
    assert sorted(quarantined(path)) == sorted(kept)
    names = sorted(os.listdir(path / "recovery"))  # of all starts but the oldest
    assert len(names) == REPORTS_KEPT
    assert names[-1] == f"{REPORTS_KEPT + 11:010d}.json"


class TestReports:
    """One file for each start."""

    def test_it_tells_what_was_found_and_done(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        story(path, last_is_durable=False)
        start = offsets(path)[-2]
        os.truncate(newest(path), start + 66)
        built = Built(path, epoch=12)
        reported = json.loads((path / "recovery" / "0000000012.json").read_bytes())
        assert reported == asdict(built.report)
        assert reported["segment"] == f"{BASE:020d}.wal"
        assert (reported["scanned_bytes"], reported["scanned_batches"], reported["trimmed_bytes"]) == (start, 3, 66)
        assert (reported["epoch"], reported["at_ns"], reported["next_sequence"], reported["errors"]) == (
            12,
            START_NS,
            6,
            [],
        )


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
            built.lines("web", [b"line"], cut=True)
        built.seal()
        built.lines("web", [b"last"])
        built.crash()
        with Opens() as opens:
            recover(built.root, built.disk, log_id=built.log_id, epoch=2, now_ns=START_NS)
        counts.append(len(opens.names))
        assert opens.names
        assert not any(name.endswith(".zst") for name in opens.names)
    assert counts[0] == counts[1]


class TestLongRecords:
    """A record in pieces, and starts in the middle of it."""

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
        assert any("acknowledged records 2 to 3" in line for line in built.report.errors)
        assert [segment.base_sequence for segment in list_segments(built.root).segments] == [1, 2, 4]
        assert sum(file.read_bytes().count(b" and on") for file in built.root.segments.iterdir()) == (kind == "pieces")
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("web", [b"4"])
        built.lines("long", [b"whole"])
        for _ in range(2):
            # A missing batch may have been a piece of the record, so the record is not returned as whole.
            assert readable(path, "long") == [b"whole"]
            assert readable(path, "web") == [b"4"]
            built.cut(seal=True)
            built.lines("other", [b"6"])

    @pytest.mark.parametrize("lost", ["the end of its segment", "all pieces", "all", "the file"])
    def test_one_is_not_joined_without_pieces_that_are_gone(self, tmp_path: Path, lost: str) -> None:
        """No sequence is missing, so a start passes over one: readers then know that something is."""
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        if lost != "the end of its segment":
            built.cut()
        control_end = built.writer.position
        built.piece("long", b" and on", begins=False, ends=False)
        end = {"all pieces": control_end, "all": 0}.get(lost, built.writer.position)
        built.piece("long", b" and further", begins=False, ends=False)
        built.crash()
        if lost == "the file":
            newest(path).unlink()
        else:
            os.truncate(newest(path), end)
        built = Built(path, epoch=2)
        assert any("pieces of the unfinished record 1 are lost" in line for line in built.report.errors)
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("long", [b"whole"])
        damage: list[Damaged] = []
        assert [record.value for record in built.log.records("long", on_damage=damage.append)] == [b"whole"]
        assert any("record 1 cannot be read" in each.message for each in damage)
        built.crash()
        built = Built(path, epoch=3)
        assert built.report.errors == []
        assert readable(path, "long") == [b"whole"]


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

    @pytest.mark.parametrize("end", ["crash", "close"])
    def test_it_is_the_same_after_starts_and_cuts(self, tmp_path: Path, end: str) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        for epoch in range(2, 5):
            state = built.writer.state
            built.crash() if end == "crash" else built.writer.close()
            built = Built(path, epoch=epoch)
            assert built.writer.state == state
            built.lines("other", [b"more"], cut=True)
            built.lines("other", [b"more"])
        assert built.writer.state.open_records == {"long": 11}
        assert built.writer.state.producers.next_expected(7) == 5

    @pytest.mark.parametrize("sealed", [False, True], ids=["raw", "sealed"])
    @pytest.mark.parametrize("empty", [False, True], ids=["with records", "empty"])
    def test_without_a_control_batch_it_comes_from_the_segment_before(
        self, tmp_path: Path, sealed: bool, empty: bool
    ) -> None:
        path = tmp_path / "log"
        built = self.build(path, sealed=sealed and not empty)
        if empty:
            built.cut()
            if sealed:
                built.seal()
        state = built.writer.state
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert (built.report.fate == "quarantine") == empty
        assert len(built.report.errors) == 1 or empty
        assert built.writer.state == state

    def test_a_record_stays_open_if_shrinking_has_dropped_others_behind_its_beginning(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.lines("other", [b"read by everybody"])
        built.cut(seal=True)
        shrink(built, 1, other=2)
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert built.report.fate == "quarantine"
        assert built.writer.state.open_records == {"long": 1}
        assert built.writer.state.routes == {"long": 1, "other": 2}
        built.piece("long", b" and end\n", begins=False, ends=True)
        assert readable(path, "long") == [b"begin and end"]
        assert errors(path) == []


class TestHead:
    """The head is a hint about what must be there; it may be lost."""

    @pytest.mark.parametrize("head", [None, bytes(160)], ids=["missing", "zeros"])
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


class TestUnfinishedWrites:
    """Effects of a crash on the last, unacknowledged batch."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        """Return the log after the crash; each damage is done to a copy."""
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
        last = len(data[:end].rstrip(b"\0"))  # the rest is padding, which is zeros too
        for length in range(start + padding, last, 5):
            whole = data[:length].ljust(SEGMENT_BYTES, b"\0") if padding else data[:length]
            self.check(log, tmp_path / "log", whole)

    def test_a_bit_flipped_anywhere(self, log: Path, tmp_path: Path) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for position in range(start, end, 5):
            self.check(log, tmp_path / "log", flipped(data, 8 * position + position % 8))

    def test_a_power_cut_at_any_moment_leaves_it_in_the_segment_or_in_quarantine(self, log: Path) -> None:
        segment, start = newest(log), offsets(log)[-2]
        torn = flipped(segment.read_bytes(), 8 * start)
        segment.write_bytes(torn)
        torn = torn[start:].rstrip(b"\0")
        disk = RecordingDisk(log, seed=1, every=True, ordered=False)
        disk.platter.load(log)
        built = Built(log, segment_max_bytes=SEGMENT_BYTES, epoch=2, disk=disk)
        assert built.report.trimmed_bytes == len(torn)
        for state in disk.states:
            files = dict(state.files)
            in_segment = files.get(str(segment.relative_to(log))) or b""
            assert torn in in_segment or files.get(built.report.kept_in) == torn, state.after


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
        """Zero a batch; return all bytes after its start."""
        data = newest(path).read_bytes()
        data = data[: places[batch]] + bytes(places[batch + 1] - places[batch]) + data[places[batch + 1] :]
        newest(path).write_bytes(data)
        return data[places[batch] : places[-1]]

    @pytest.mark.parametrize("missing", [2, 4])
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

    def test_no_head_is_needed_to_tell(self, tmp_path: Path) -> None:
        """A power cut may take it, or leave its pages empty."""
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4", b"5"])
        rest = self.spoil(path, places, 4)
        built.root.head.write_bytes(bytes(160))
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"2", b"3"], 4)

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
